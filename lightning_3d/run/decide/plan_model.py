"""Planning a model for a run, alike on all ranks: in microbatches, or inline where stages can't follow its step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.distributed.agreement import on_one_rank, raise_on_all_ranks
from lightning_3d.distributed.rng import Generators
from lightning_3d.model.snapshot import preserved
from lightning_3d.planning.inline_mode import follows_from_stages, inline_text, reason_for_inline, unfollowed_text
from lightning_3d.planning.observer import Observation, Observer
from lightning_3d.planning.plan import Plan
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.built_model import BuiltModel, prepare_model
from lightning_3d.run.decide.example_step import example_step
from lightning_3d.run.decide.step_planner import StepPlanner
from lightning_3d.waits import long_wait


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and what it is based on."""

    context: RunContext
    """With the mode in which the pipeline runs."""
    built: BuiltModel
    observed: Observation
    plan: Plan


def plan_model(context: RunContext) -> Planned:
    """Prepare a model that is as its author built it, look at its step, and plan it; every rank calls it.

    Raises:
        StepError: it can't be made parallel.
        PlanError: no layout of it fits the mesh, or the ranks were given different ones.
        Exception: with ``pipeline.mode="microbatched"``, why stages can't follow the step; else inline, what can't run
            there either.
    """
    built, config = prepare_model(context), context.config
    if (why := reason_for_inline(context.module, config)) is not None:
        return _inline(context, built, why)
    if context.mesh.shape.pp == 1:
        return _decided(context, built, *_look(context))
    try:
        with raise_on_all_ranks():  # the user's code may fail on one rank alone
            observer, observed = _look(context)
            if observed.trace is not None:
                observed.trace.refuse_what_counts_once()
        return _decided(context, built, observer, observed)
    except Exception as error:
        if not follows_from_stages(error, config):
            raise
        return _inline(context, built, unfollowed_text(error))


def _inline(context: RunContext, built: BuiltModel, why: str) -> Planned:
    config = context.config
    # Logits are read on all ranks, of which one has the head.
    activations = replace(config.activations, fused_loss="never")
    inline = replace(context, config=replace(config, pipeline=config.pipeline.as_inline, activations=activations))
    observer, observed = _look(inline)
    planned = _decided(inline, built, observer, replace(observed, inline=why))
    if config.pipeline.mode == "auto":
        rank_zero_info(f"{type(context.module).__name__}: {inline_text(why)}")
    return planned


def _planner(context: RunContext) -> StepPlanner:
    step_of = partial(example_step, context.trainer, context.module, precision=context.precision)
    return StepPlanner(context.module, step_of, context.device, context.precision)


def _look(context: RunContext) -> tuple[Observer, Observation]:
    planner, config, shape = _planner(context), context.config, context.mesh.shape
    return planner.look(planner.step_of(config, shape), config, shape)


def _decided(context: RunContext, built: BuiltModel, observer: Observer, observed: Observation) -> Planned:
    shape, random = context.mesh.shape, Generators(context.device)
    with long_wait("Planning"), random.preserved(), preserved(context.module):  # on one rank alone
        plan = on_one_rank(lambda: _planner(context).decide(observed, context.config, shape))
    blocks = plan.blocks_in(context.module)
    if shape.tp > 1 and observed.blocks != blocks:  # the user's code differs by rank
        with random.preserved():
            observed = observer.of_blocks(blocks)
    return Planned(context=context, built=built, observed=observed, plan=plan)
