"""Random numbers that a step draws outside of blocks, of the batch alone: noise, timesteps, masks.

Each microbatch draws its own. Where code runs again on the whole batch, it has to meet the same numbers, or the noise
that a loss compares with is not that which the blocks were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import Call
from lightning_3d.pipeline.joints import Joint
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.fake_blocks import RandomnessSeen
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.refusals import user_frame


class Draws:
    """Notes what microbatches draw, and repeats it for the whole batch.

    Args:
        shares: The microbatches' shares of the samples.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        self._shares = shares
        self._drawn: list[list[list[Tensor]]] = [[] for _ in shares]  # by microbatch, call, tensor
        self._position = 0

    def note(self, index: int, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of a torch function for a microbatch, and note what it drew, if it did."""
        with RandomnessSeen() as randomness:
            output = func(*args, **kwargs)
        if randomness.seen:
            self._drawn[index].append([leaf.detach().clone() for leaf in _tensors(output)])
        return output

    def repeat(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call for the whole batch; if it draws, it gives what the microbatches drew.

        Raises:
            StepError: these don't make up what the whole batch draws.
        """
        with RandomnessSeen() as randomness:
            output = func(*args, **kwargs)
        if not randomness.seen:
            return output
        position, self._position = self._position, self._position + 1
        if all(len(of_part) <= position for of_part in self._drawn):  # after what the blocks need
            return output
        name = getattr(func, "__name__", str(func))
        try:
            columns = zip(*(of_part[position] for of_part in self._drawn), strict=True)
            for leaf, parts in zip(_tensors(output), columns, strict=True):
                _put(leaf, parts, self._shares, is_order=name == "randperm")
        except (IndexError, ValueError) as error:
            raise StepError(
                f"{name} (called at {user_frame()}) draws random numbers in the step, for each microbatch others, that"
                " do not make up those of the whole batch, whose loss needs them again. Draw numbers for each sample,"
                " in a module that is a block, or in the dataset, or set pipeline.loss='mean'."
            ) from error
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@torch.no_grad()
def _put(whole: Tensor, parts: Sequence[Tensor], shares: Sequence[float], *, is_order: bool) -> None:
    joint = Joint(TensorMeta.of(whole), [TensorMeta.of(part) for part in parts], shares)
    if joint.is_constant and any(not torch.equal(part, parts[0]) for part in parts):
        raise ValueError("one draw for the whole batch")
    if is_order:  # each within its microbatch
        starts = torch.tensor([0, *map(len, parts)]).cumsum(0).tolist()
        parts = [part + start for part, start in zip(parts, starts, strict=False)]
    whole.copy_(joint.join(parts))
