"""The layout of a fit that sets none: its ranks look at the model, the batch and their machine, and choose alike."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.strategies import ParallelStrategy
from rich.console import Console

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.data.batches import example_batch
from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.distributed.device_memory import available_memory
from lightning_3d.distributed.machine import Machine
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.distributed.rng import Generators
from lightning_3d.distributed.speed import measured_machine
from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import preserved
from lightning_3d.pipeline.microbatches import num_samples
from lightning_3d.planning.held import least_held
from lightning_3d.planning.layouts import Choice, Layout
from lightning_3d.planning.observer import ExampleStep
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.dry_run import DryRun, search_layout
from lightning_3d.run.decide.example_step import example_step
from lightning_3d.run.decide.requirements import check, check_model
from lightning_3d.torch_internals.lightning_helpers import (
    active_loaders,
    callbacks_of,
    forget_loaders,
    make_optimizers,
    samplers_noted,
)
from lightning_3d.waits import long_wait
from lightning_3d.zero.optimizer_kind import is_known

_ONE_BUCKET = 2**20  # bytes of weights that replicas reduce at once: nothing is gained by another layout
_OF_STATE = 0.6  # the part of the memory that a model which can't be traced may hold between steps


def choose_layout(context: RunContext, ranks_per_node: int) -> Choice | None:
    """The layout of a fit; None for one that is to be of plain replicas, without more words. Every rank calls it.

    Args:
        context: On a mesh of plain replicas, for which dataloaders are made first.
        ranks_per_node: Processes that share a machine.
    """
    trainer, module, config, shape = context.trainer, context.module, context.config, context.mesh.shape
    precision, device = context.precision, context.device
    check_model(module, config, shape)
    if sum(p.nbytes for p in module.parameters() if p.requires_grad) <= _ONE_BUCKET:
        return None
    generators = Generators(device)
    before = generators.states()
    with samplers_noted(trainer) as sampled:
        if active_loaders(trainer) is None:
            return None
    has_samplers = bool(sampled) and all(sampled)
    precision.convert(module, config.precision, device)
    weights = sum(parameter.nbytes for parameter in module.parameters())
    memory = min(gather_numbers(available_memory(device, shape.world_size, weights)))
    ahead = DryRun(
        module,
        partial(example_step, trainer, module, precision=precision),
        device,
        precision,
        checks=partial(_check_all, trainer, module, has_samplers),
    )
    with long_wait("Choosing a layout"), generators.preserved():
        machine = measured_machine(device, precision.casts_to or next(module.parameters()).dtype, ranks_per_node)
        choice = _agreed(_searched(ahead, trainer, config, shape, machine, memory))
        if (choice.layout.zero_stage == 3 or not choice.layout.is_replicas) and not _steps_by_element(module):
            layout = Layout(shape=MeshShape(dp=shape.dp))
            choice = replace(choice, layout=layout, reason="its optimizers may have to see parameters whole")
    if choice.layout.replicas != shape.size("samples"):
        generators.restore(before)
        forget_loaders(trainer)
    if any(isinstance(callback, ModelSummary) for callback in callbacks_of(trainer)) and dist.get_rank() == 0:
        Console().print(choice)
    return choice


def _steps_by_element(module: LightningModule) -> bool:
    """Whether all optimizers are torch's that need no more of a parameter than the elements that they step."""
    try:
        with preserved(module):
            optimizers, _ = make_optimizers(module)
    except Exception:  # of what is not there yet
        return False
    return all(map(is_known, optimizers))


def _check_all(
    trainer: Trainer, module: LightningModule, has_samplers: bool, config: ThreeDConfig, shape: MeshShape
) -> None:
    if shape.is_model_parallel and not has_samplers:
        raise StepError("the Trainer makes no samplers for its dataloaders, so that each rank has samples of its own")
    assert isinstance(trainer.strategy, ParallelStrategy)
    check(trainer, trainer.strategy, module, config, shape)
    check_model(module, config, shape)


def _searched(
    ahead: DryRun, trainer: Trainer, config: ThreeDConfig, shape: MeshShape, machine: Machine, memory: int
) -> Choice:
    """The choice of this rank; of replicas where steps can't be planned."""
    why = "it uses manual optimization"
    try:
        if ahead.module.automatic_optimization:
            num = num_samples(example_batch(trainer))
            return search_layout(ahead, config, machine, shape.world_size, memory, num_samples=num)
    except Exception as error:  # of the user's step, or of the batch
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    layout = Layout(shape=MeshShape(dp=shape.dp))
    least = least_held(ahead.module, replace(config, zero=ZeroConfig()), ExampleStep.num_states, shape=shape)
    layout = layout if least <= _OF_STATE * memory else replace(layout, zero_stage=3)
    return Choice(layout=layout, reason=f"no other can be planned: {why}", predicted={}, refused={})


def _agreed(mine: Choice) -> Choice:
    """The choice of rank 0, unless it can't run on another rank."""
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    untraced = [choice for choice in everyone if not choice.predicted]
    first = (untraced or everyone)[0]
    refused = {layout for choice in everyone for layout in choice.refused}
    if first.layout not in refused or not first.predicted:
        return first
    left = [layout for layout in first.ranking if layout not in refused or layout.is_replicas]
    return replace(first, layout=left[0], reason=f"{first.reason}, of those that all ranks can run")
