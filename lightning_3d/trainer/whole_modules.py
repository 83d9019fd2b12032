"""Modules of the model that stand in a checkpoint, as ``save_hyperparameters()`` puts them there: whole and plain.

A file with what one rank holds of them would not hold them, and nothing outside of a run could read it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from lightning_3d.torch_internals.pytree import tree_leaves, tree_map


def modules_whole(
    checkpoint: Mapping[str, Any], model: nn.Module, summoned: AbstractContextManager[None], *, is_saved_here: bool
) -> dict[str, Any]:
    """A checkpoint with copies in place of modules of the model; every rank calls it.

    Args:
        summoned: Lets the model be whole on every rank inside.
        is_saved_here: Whether this rank writes them.
    """
    inner = set(model.modules())
    places = [key for key, value in checkpoint.items() if any(_is_in(leaf, inner) for leaf in tree_leaves(value))]
    if not places:
        return dict(checkpoint)
    memo: dict[int, Any] = {}

    def copied(leaf: Any) -> Any:
        if not _is_in(leaf, inner):
            return leaf
        return copy.deepcopy(leaf, memo) if is_saved_here else None

    with summoned:
        return {**checkpoint, **{key: tree_map(copied, checkpoint[key]) for key in places}}


def _is_in(leaf: object, modules: set[nn.Module]) -> bool:
    return isinstance(leaf, nn.Module) and leaf in modules
