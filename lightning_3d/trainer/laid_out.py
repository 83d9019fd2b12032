"""The layouts that models have, for those that get another one: a second Trainer, with a strategy of its own."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.trainer.full_params import stay_whole


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan as it was carried out."""

    plan: Plan
    mesh: Mesh
    device: torch.device


_layouts: WeakKeyDictionary[nn.Module, Layout] = WeakKeyDictionary()


def lay_out(module: nn.Module, layout: Layout) -> None:
    """Note that a model has a layout."""
    _layouts[module] = layout


def has_layout(module: nn.Module, layout: Layout | None) -> bool:
    """Whether it is this one that the model has."""
    return layout is not None and _layouts.get(module) is layout


def leave_layout(module: nn.Module) -> None:
    """Let a model be as it was built, if it has a layout; every rank calls it."""
    layout = _layouts.pop(module, None)
    if layout is not None:
        stay_whole(module, layout.plan, layout.mesh, layout.device)
