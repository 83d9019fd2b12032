"""The checkpoints of a run: what Lightning asks the strategy for, and the place that a fit goes on from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from torch import nn

from lightning_3d.checkpoint.run_state import RUN, gather_ranks, of_this_rank
from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import StepError
from lightning_3d.model.initial_weights import is_on_meta
from lightning_3d.model.unbuilt import is_unbuilt
from lightning_3d.parts.layout import check_layout, full_modules, has_some_layout, summoned
from lightning_3d.run.parallel.parallel_model import ParallelModel
from lightning_3d.run.run import Run
from lightning_3d.torch_internals.data_loops import recount_batches
from lightning_3d.torch_internals.lightning_helpers import load_loader_states


def own_parts(run: Run, what: str) -> ParallelModel:
    """The parallel model, if the module is still as this run's Trainer laid it out.

    Args:
        what: What was done, for the message.

    Raises:
        StepError: the model has no layout yet, or that of another Trainer.
    """
    check_layout(run.module, run.parallel.layout if run.is_parallel else None, what)
    return run.parallel


@contextmanager
def summon(run: Run, module: nn.Module | None, *, writeback: bool) -> Iterator[None]:
    """Let the model be plain and whole inside; every rank enters.

    Raises:
        StepError: a step is running, or another Trainer has run the model since.
    """
    if run.is_parallel and run.steps.is_running:
        raise StepError(
            "summon_full_params was entered in a step, whose pipeline stages and units hold parts of the model. Do"
            " it in a hook or after fit."
        )
    parallel, context = own_parts(run, "summon_full_params was called"), run.context
    parallel.zero.wait_params()
    is_in_parts = context.is_in_parts
    with summoned(parallel.layout, module, context.rendezvous, is_in_parts=is_in_parts, writeback=writeback):
        yield


def is_as_built(run: Run) -> bool:
    """Whether no Trainer has run the model, so that rank 0 has the whole of it."""
    return not run.is_parallel and not has_some_layout(run.module)


def restores_late(run: Run) -> bool:
    """Whether ranks get their weights in setup, so that there is nothing to restore before; every rank asks."""
    if run.restores_late is None:
        run.restores_late = any(gather_numbers(int(is_unbuilt(run.module) or is_on_meta(run.module))))
    return run.restores_late


# ---- saving


def model_state(run: Run) -> dict[str, Any]:
    """This rank's part of the model's state, for `save`; every rank calls it."""
    parallel = own_parts(run, "a checkpoint was to be saved")
    run.ranks.sync_check("a checkpoint, as by trainer.save_checkpoint")
    run.ranks.rendezvous.sync_point()
    parallel.settle()
    return run.checkpoints.model_state()


def save(run: Run, checkpoint: dict[str, object], path: str | os.PathLike[str], storage_options: object) -> None:
    """Save a checkpoint with the place that a fit is at; every rank calls it."""
    context = run.context
    if context.is_in_parts:
        whole = summon(run, None, writeback=False)
        checkpoint = full_modules(checkpoint, run.module, whole, is_saved_here=context.strategy.is_global_zero)
    if run.resuming is not None and "optimizer_states" in checkpoint:  # it is to go on from
        place = {
            "mesh": asdict(context.mesh.shape),
            "optimizers": [type(optimizer).__name__ for optimizer in context.strategy.optimizers],
            "steps": {"seed": run.parallel.randomness.seed, "number": run.steps.number},
            "ranks": gather_ranks(run.resuming.state()),
            "samples_per_step": run.config.samples_per_step,
            "batches_per_step": run.batches_per_step,
        }
        checkpoint = {**checkpoint, RUN: place}
    run.checkpoints.save_checkpoint(checkpoint, path, storage_options)


# ---- going on


def load(run: Run, path: str | os.PathLike[str], *, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint. A fit that goes on from several replicas keeps their order of samples, also as one."""
    checkpoint = run.checkpoints.load_checkpoint(path, weights_only=weights_only)
    if run.is_fit and RUN in checkpoint:
        run.keeps_replicas_order = checkpoint[RUN]["ranks"][0].get("replicas", 1) > 1
    return checkpoint


def load_model(run: Run, checkpoint: Mapping[str, object], *, strict: bool) -> None:
    """Fill the model; all of one that is empty."""
    run.checkpoints.load_model(checkpoint, strict=strict or (run.is_parallel and run.parallel.is_empty))
    if run.is_parallel:
        run.parallel.is_empty = False


def load_optimizers(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Fill the optimizers, and note the place of the fit that this one goes on with."""
    load_loader_states(run.trainer)  # planning has made them before loops were restored
    run.resumes = resumes = checkpoint.get(RUN)
    samples = run.config.samples_per_step
    if resumes is not None and samples is not None and samples == resumes.get("samples_per_step"):
        recount_batches(run.trainer, resumes["batches_per_step"])
    run.context.precision.take_other_scale(checkpoint)
    run.checkpoints.load_optimizers(checkpoint)


def begin_training(run: Run) -> None:
    """Take a fit to the place that it goes on from, when all that it sets up is there."""
    run.checkpoints.is_training = True
    resumes, run.resumes = run.resumes, None
    if resumes is not None:
        assert run.resuming is not None
        run.parallel.randomness.seed, run.steps.number = resumes["steps"]["seed"], resumes["steps"]["number"]
        run.resuming.load_state(of_this_rank(resumes, run.ranks.mesh))
