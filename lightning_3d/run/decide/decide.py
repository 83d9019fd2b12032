"""Deciding what becomes of a model: it is prepared, its step is traced, and all ranks have one plan."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.built_model import BuiltModel, prepare_model
from lightning_3d.run.decide.plan_step import Planned, plan_step
from lightning_3d.torch_internals.launchers import RunLauncher

_NO_PATHS = (None, "best", "last", "hpc", "registry")
"""Values of ``ckpt_path`` for which there may be no checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A plan, and the model that it is of."""

    context: RunContext
    """With the mode in which the pipeline runs."""
    built: BuiltModel
    planned: Planned


def decide_plan(context: RunContext) -> Decided:
    """Plan a model that is as its author built it; every rank calls it.

    Raises:
        StepError: it can't be made parallel.
        PlanError: no layout of it fits the mesh, or the ranks were given different ones.
    """
    launcher = context.strategy.launcher
    assert isinstance(launcher, RunLauncher)
    built = prepare_model(context, is_restored=launcher.ckpt_path not in _NO_PATHS)
    planned = plan_step(context)
    return Decided(context=replace(context, config=planned.config), built=built, planned=planned)
