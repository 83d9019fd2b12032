"""How many batches a replica accumulates, so that a step has the samples that ``samples_per_step`` asks for."""

from __future__ import annotations

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_3d.data.step_sampler import StepSampler, check_samples_per_step
from lightning_3d.errors import ConfigError
from lightning_3d.run.context import RunContext
from lightning_3d.torch_internals.lightning_helpers import active_loaders, callbacks_of


def batches_per_step(context: RunContext, samples: int) -> int:
    """The batches that a replica accumulates for a step of so many samples; every rank calls it in a fit.

    Raises:
        ConfigError: batches of all replicas don't make such a step, or the Trainer is told how many to accumulate.
    """
    trainer, loaders = context.trainer, active_loaders(context.trainer)
    if loaders is None:
        return trainer.accumulate_grad_batches
    has_scheduler = any(
        type(each) is GradientAccumulationScheduler and each.going_to_accumulate_grad_batches()
        for each in callbacks_of(trainer)
    )
    if trainer.accumulate_grad_batches != 1 or has_scheduler or not context.module.automatic_optimization:
        raise ConfigError(
            f"samples_per_step={samples} says how many batches make a step, but so do"
            f" Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), GradientAccumulationScheduler and"
            " manual optimization: use one of them"
        )
    if len(loaders.flat) != 1 or (batch := _batch_size(loaders.flat[0])) is None:
        raise ConfigError(
            f"samples_per_step={samples} needs one training dataloader that tells its batch_size, but there are"
            f" {len(loaders.flat)}, the first a {type(loaders.flat[0]).__name__}: use"
            " Trainer(accumulate_grad_batches=...)"
        )
    replicas = context.mesh.shape.size("samples")
    num = check_samples_per_step(samples, batch, replicas)
    sampler = getattr(loaders.flat[0], "sampler", None)
    if not isinstance(sampler, StepSampler):
        rank_zero_warn(
            f"samples_per_step={samples}: the training data have an order of their own ({type(sampler).__name__}), so"
            " that steps have as many samples, but others, on another number of replicas."
        )
    rank_zero_info(f"A step has {samples} samples: {num} batches of {batch} on each of {replicas} replicas.")
    return num


def _batch_size(loader: object) -> int | None:
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
