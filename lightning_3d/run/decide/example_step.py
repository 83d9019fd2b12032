"""The step that a Trainer is about to run, by example, for planning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.batches import example_batch
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.pipeline.microbatches import copied_batch, split_batch
from lightning_3d.planning.inline_mode import is_microbatched
from lightning_3d.planning.observer import ExampleStep
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.decide.rehearsal import with_simulated_fit_start
from lightning_3d.torch_internals.lightning_helpers import before_transfer, callbacks_of, further_arguments

_STEPS: Mapping[TrainerFn, str] = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def modes_of(name: str, precision: ThreeDPrecision) -> Callable[[], AbstractContextManager[None]]:
    """The autograd and autocast modes of a step of that name."""

    @contextmanager
    def modes() -> Iterator[None]:
        with torch.set_grad_enabled(name == "training_step"), precision.forward_context():
            yield

    return modes


def _accumulates(trainer: Trainer) -> bool:
    """Whether the gradients of several batches add up, in some epoch at least."""
    scheduled = (each for each in callbacks_of(trainer) if isinstance(each, GradientAccumulationScheduler))
    most = max((max(each.scheduling.values()) for each in scheduled), default=1)
    return max(most, trainer.accumulate_grad_batches) > 1


def example_step(
    trainer: Trainer, module: LightningModule, config: ThreeDConfig, shape: MeshShape, precision: ThreeDPrecision
) -> ExampleStep:
    """The step with its first microbatch; without a batch on a mesh whose plan does not depend on it."""
    assert trainer.state.fn is not None
    name, microbatch, rest = _STEPS[trainer.state.fn], None, tuple[Any, ...]()
    is_whole = not is_microbatched(config, shape)
    if shape.tp > 1 or not is_whole or (config.activations.plans_memory and name == "training_step"):
        rest = further_arguments(trainer, getattr(module, name))
        batch = before_transfer(module, trainer.precision_plugin.convert_input(example_batch(trainer)))
        batch = copied_batch(trainer.strategy.batch_to_device(batch, dataloader_idx=0))  # the first step gets it, too
        microbatch = split_batch(batch, config.num_microbatches)[0].batch

    return ExampleStep(
        name=name,
        microbatch=microbatch,
        modes=modes_of(name, precision),
        rest=rest,
        has_data=is_whole,
        accumulates=_accumulates(trainer),
        with_simulated_fit_start=partial(with_simulated_fit_start, trainer, module, name, microbatch, rest),
    )
