"""The layouts that models have, for those that get another one: a second Trainer, with a strategy of its own.

Every module of a model knows the model's layout, so that another model that shares modules with it finds it, too, as
one that is finetuned from another's backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.trainer.full_params import stay_whole

_LAYOUT = "_lightning_3d_layout"


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as it was carried out; copies and pickles of a module have none."""

    module: nn.Module
    plan: Plan
    mesh: Mesh
    device: torch.device
    copies: list[nn.Module] = field(default_factory=list)
    """Copies of the model that have the same layout."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def lay_out(layout: Layout) -> None:
    """Note that a model has a layout, in all of its modules."""
    for inner in layout.module.modules():
        vars(inner)[_LAYOUT] = layout


def has_layout(module: nn.Module, layout: Layout | None) -> bool:
    """Whether it is this one that the model has."""
    return layout is not None and vars(module).get(_LAYOUT) is layout


def leave_layouts(module: nn.Module, copies: Sequence[nn.Module]) -> None:
    """Let a model be as it was built, and others that share modules with it, if they have layouts; every rank calls it.

    Args:
        copies: Copies of the model, of which those that were made while it had a layout are whole with it.
    """
    layouts = dict.fromkeys(found for inner in module.modules() if (found := vars(inner).get(_LAYOUT)) is not None)
    for layout in layouts:
        further = copies if layout.module is module else ()
        for held in dict.fromkeys([layout.module, *layout.copies, *further]):
            stay_whole(held, layout.plan, layout.mesh, layout.device)
        for inner in layout.module.modules():
            vars(inner).pop(_LAYOUT, None)
