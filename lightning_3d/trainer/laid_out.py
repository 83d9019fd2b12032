"""The layouts that models have, for those that get another one: a second Trainer, with a strategy of its own.

Every module of a model knows the model's layout, so that another model that shares modules with it finds it, too, as
one that is finetuned from another's backbone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import nn

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.trainer.full_params import stay_whole
from lightning_3d.zero.gathered import reshard_units

LAYOUT = "_lightning_3d_layout"
"""Attribute of a module: the layout that its model has."""


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as it was carried out; copies and pickles of a module have none."""

    module: nn.Module
    plan: Plan
    mesh: Mesh
    device: torch.device
    copies: list[nn.Module] = field(default_factory=list)
    """Copies of the model that have the same layout."""
    modules: list[nn.Module] = field(init=False)
    """The model's modules, and `parameters`: as they were laid out."""
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", list(self.module.modules()))
        object.__setattr__(self, "parameters", _parameters(self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def lay_out(layout: Layout) -> None:
    """Note that a model has a layout, in all of its modules."""
    for inner in layout.modules:
        vars(inner)[LAYOUT] = layout


def has_layout(module: nn.Module, layout: Layout | None) -> bool:
    """Whether it is this one that the model has."""
    return layout is not None and vars(module).get(LAYOUT) is layout


def has_some_layout(module: nn.Module) -> bool:
    """Whether any of its modules has one, of whichever Trainer."""
    return any(LAYOUT in vars(inner) for inner in module.modules())


def is_laid_out(module: nn.Module, layout: Layout | None) -> bool:
    """Whether it is this one that the model has, with the modules and parameters that it had: others may have been put
    in between two runs.
    """
    if layout is None or not has_layout(module, layout):
        return False
    now, before = [*module.modules(), *_parameters(module)], [*layout.modules, *layout.parameters]
    return len(now) == len(before) and all(map(is_, now, before))


def leave_layouts(module: nn.Module, copies: Sequence[nn.Module]) -> None:
    """Let a model be as it was built, and others that share modules with it, if they have layouts; every rank calls it.

    Args:
        copies: Copies of the model, of which those that were made while it had a layout are whole with it.
    """
    layouts = dict.fromkeys(found for inner in module.modules() if (found := vars(inner).get(LAYOUT)) is not None)
    for layout in layouts:
        further = copies if layout.module is module else ()
        present = set(layout.module.modules())
        removed = [inner for inner in layout.modules if inner not in present]
        for held in dict.fromkeys([layout.module, *layout.copies, *further, *removed]):
            stay_whole(held, layout.plan, layout.mesh, layout.device)
        for inner in layout.modules:
            vars(inner).pop(LAYOUT, None)


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    reshard_units(module)
    return list(module.parameters())
