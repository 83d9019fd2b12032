"""A tensor that is kept for a backward, and given back unless it was changed in place meanwhile.

Autograd looks for such changes itself, but not where hooks keep what it saves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.dispatch import alias_below_autograd
from lightning_3d.torch_internals.tensors import version_of

Saved = Callable[[], Tensor]
"""Gives back a tensor that was kept."""
Save = Callable[[Tensor], Saved]
"""Keeps a tensor."""


def unpack(saved: Saved) -> Tensor:
    """The tensor, for ``saved_tensors_hooks``."""
    return saved()


def check_unchanged(counter: Tensor, version: int, shape: torch.Size) -> None:
    """Look for changes in place of a tensor that was kept.

    Args:
        counter: Has its version.
        version: That at which it was kept.

    Raises:
        StepError: it was changed.
    """
    if version_of(counter) != version:
        raise StepError(
            f"A tensor of shape {tuple(shape)} that a block keeps for its backward was changed in place after it was"
            f" kept (at version {version}, now {version_of(counter)}), so that gradients can't be computed. Change a"
            " clone of it."
        )


class SavedTensor:
    """Keeps a tensor where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = alias_below_autograd(tensor)  # with its history it would keep the graph that keeps it
        self._version = version_of(self._tensor)

    def __call__(self) -> Tensor:
        """The tensor, without history."""
        check_unchanged(self._tensor, self._version, self._tensor.shape)
        return self._tensor
