"""Requirements on a run, its model and its optimizers on a given mesh; raises for the rest, alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.deepspeed import FromDeepSpeed
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.mesh import Mesh, MeshShape
from lightning_3d.errors import ConfigError, StepError
from lightning_3d.model.block_runner import SUMMON, runner_of
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.remembered import remembering_attribute
from lightning_3d.run.decide.unsafe_optimizers import (
    refuse_collectives,
    refuse_schedules,
    refuse_unsaved,
    stepping_device,
    steps_parts,
)
from lightning_3d.torch_internals.lightning_helpers import callbacks_of, fetches_itself, has_own_io, layer_sync_of
from lightning_3d.torch_internals.modules import BatchNorm
from lightning_3d.torch_internals.optimizers import has_step_hooks
from lightning_3d.torch_internals.tensors import has_gradient_hooks
from lightning_3d.zero.optimizer_kind import OptimizerKind, communicates, optimizer_kind


def refuse_offload(config: ActivationsConfig, device: torch.device) -> None:
    """Raise for activations that would be moved to where they are."""
    if config.offload and device.type == "cpu":
        raise ConfigError(
            "activations.offload=True moves what blocks keep for their backwards from the memory of an accelerator to"
            f" that of the host, but this run computes on the CPU (device {device}), where they are in host memory from"
            " the start: set it to False, or use Trainer(accelerator='gpu')."
        )


def check_run(context: RunContext, deepspeed: FromDeepSpeed | None) -> None:
    """Raise for a Trainer, settings, callbacks and steps that can't run on the mesh.

    Args:
        deepspeed: The DeepSpeed config that the settings are from.

    Raises:
        ConfigError: settings do not go together.
        StepError: a callback or a step can't run.
    """
    trainer, shape, precision = context.trainer, context.mesh.shape, context.precision.precision
    if context.is_fit and deepspeed is not None:
        deepspeed.check(
            shape.dp,
            precision=precision,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            accumulate_grad_batches=trainer.accumulate_grad_batches,
        )
    context.config.precision.check_for(precision)
    check(trainer, context.strategy, context.module, context.config, shape)


def check(
    trainer: Trainer, strategy: ParallelStrategy, module: LightningModule, config: ThreeDConfig, shape: MeshShape
) -> None:
    """Raise for settings, callbacks and steps that can't run on a mesh of this shape.

    Raises:
        ConfigError: settings do not go together.
        StepError: a callback or a step can't run.
    """
    if has_own_io(strategy):
        _raise_first(ConfigError, _problems_of_io(type(strategy.checkpoint_io).__name__, config))
    problems = _problems_of_callbacks(trainer, config, shape)
    if trainer.state.fn == TrainerFn.FITTING:
        syncing, device = layer_sync_of(strategy), strategy.root_device
        norms = _problems_of_norms(module, syncing, shape, device.type)
        problems = chain(problems, _problems_of_budget(module, config.activations), norms)
    _raise_first(StepError, problems)


def check_model(module: LightningModule, config: ThreeDConfig, shape: MeshShape) -> None:
    """Raise for a model that can't be made parallel.

    Raises:
        StepError: it can't.
    """
    _raise_first(StepError, _problems_of_model(module, config, shape))


def _raise_first(error: type[ConfigError | StepError], problems: Iterator[str]) -> None:
    for problem in problems:
        raise error(problem)


def _problems_of_io(name: str, config: ThreeDConfig) -> Iterator[str]:
    """Settings that do not go with a ``CheckpointIO`` of the user's."""
    if config.save_distributed_checkpoint is True:
        yield (
            f"save_distributed_checkpoint=True writes folders by torch.distributed.checkpoint, not through {name}: set"
            " it to False, or leave it out, for a file through that."
        )
    if config.checkpoint.async_save:
        yield (
            "checkpoint.async_save=True writes checkpoints in the background, but a CheckpointIO of yours,"
            f" {name}, is to write them: leave out one of them."
        )


def _problems_of_callbacks(trainer: Trainer, config: ThreeDConfig, shape: MeshShape) -> Iterator[str]:
    callbacks = callbacks_of(trainer)
    if shape.world_size > 1 and any(isinstance(callback, BatchSizeFinder) for callback in callbacks):
        yield (
            f"BatchSizeFinder, or Tuner.scale_batch_size, tries batch sizes until memory runs out, but on"
            f" {shape.world_size} ranks it may run out on one of them, for which the others would wait. Set the"
            " batch size by hand."
        )
    # By its name, as its module can't be imported without the package requests.
    names = {base.__name__ for callback in callbacks for base in type(callback).__mro__}
    is_in_parts = shape.is_model_parallel or (config.zero.stage == 3 and shape.size("state") > 1)
    if is_in_parts and trainer.state.fn == TrainerFn.FITTING and "ServableModuleValidator" in names:
        yield (
            "ServableModuleValidator serves the model from rank 0, but with"
            f" pipeline_parallel_size={shape.pp}, tensor_parallel_size={shape.tp} and"
            f" zero.stage={config.zero.stage} on {shape.size('state')} ranks each has a part of it. Validate it in one"
            " process, from a checkpoint, or use size 1 for both and zero.stage<=2."
        )


def _problems_of_budget(module: LightningModule, config: ActivationsConfig) -> Iterator[str]:
    """Steps whose trace does not show their memory."""
    if config.plans_memory and not module.automatic_optimization:
        yield (
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False), but"
            f" activations.budget={config.budget!r} is planned by a trace of its training_step, before there are"
            " optimizers. Leave out activations.budget, and activations.recompute='auto', or use automatic"
            " optimization."
        )


def _problems_of_norms(
    module: LightningModule, plugin: LayerSync | None, shape: MeshShape, device_type: str
) -> Iterator[str]:
    """BatchNorm that is to take the batches of all replicas, by the Trainer's plugin or as SyncBatchNorm, and can't."""
    norms = {fqn: norm for fqn, norm in module.named_modules() if isinstance(norm, BatchNorm)}
    synced = [fqn for fqn, norm in norms.items() if isinstance(norm, nn.SyncBatchNorm) and norm.training]
    asks = plugin is not None and shape.size("samples") > 1 and bool(norms)
    if not asks and not synced:
        return
    what = f"Trainer(sync_batchnorm=True) for {next(iter(norms))}" if asks else f"{synced[0]}, a SyncBatchNorm,"
    without = "Without it each replica normalises by its own batch, as under DDP."
    if shape.is_model_parallel:
        yield (
            f"{what} communicates inside of a block, but with pipeline_parallel_size={shape.pp} and"
            f" tensor_parallel_size={shape.tp} blocks are traced, where they can't. Use size 1 for both, or leave it"
            f" out. {without}"
        )
    if device_type == "cpu" and (synced or type(plugin) is TorchSyncBatchNorm):
        yield (
            f"{what} needs torch's SyncBatchNorm, which does not run on CPUs, under DDP neither: leave it out there."
            f" {without}"
        )


def _problems_of_model(module: LightningModule, config: ThreeDConfig, shape: MeshShape) -> Iterator[str]:
    name, parameters = type(module).__name__, list(module.named_parameters())
    for fqn, tensor in (*parameters, *module.named_buffers()):
        if is_lazy(tensor):  # as DDP does: planning needs the shapes of parameters
            yield (
                f"{fqn} of {name} has no shape yet, as it is of a lazy module. Run it once on an example batch before"
                " the Trainer does, or in configure_model, or use a module that is told its sizes."
            )
    if config.pipeline.mode == "microbatched" and shape.pp > 1 and not module.automatic_optimization:
        yield (
            f"{name} uses manual optimization (automatic_optimization=False), but pipeline stages run forward and"
            " backward together in microbatches: set pipeline.mode=inline, or leave it out."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step") if shape.is_model_parallel else ():
        if fetches_itself(getattr(module, step)):
            yield (
                f"{name}.{step} takes dataloader_iter and fetches batches itself, but with"
                f" pipeline_parallel_size={shape.pp} and tensor_parallel_size={shape.tp} each batch is split, or"
                f" compared between ranks, before the step. Let it take the batch: def {step}(self, batch, batch_idx),"
                " or use size 1 for both."
            )
    for fqn, parameter in (
        parameters if shape.is_model_parallel or config.zero.is_fully_sharded(shape.size("state")) else ()
    ):
        if has_gradient_hooks(parameter):
            yield (
                f"{fqn} has gradient hooks, which would be lost: shards take the place of parameters. Change gradients"
                " in on_before_optimizer_step instead."
            )
    for fqn, inner in module.named_modules():
        if shape.world_size > 1 and isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse:
            yield (
                f"{fqn} is an {type(inner).__name__}(sparse=True), whose gradients have no sharded form. Use"
                " sparse=False."
            )
        if runner_of(inner) is not None or isinstance(inner, FSDPModule):
            yield (
                f"{name} is a copy of a model that was made parallel before, and has parts of it. Copy that one"
                f" {SUMMON}."
            )


def check_optimizers(
    optimizers: Sequence[Optimizer], module: LightningModule, mesh: Mesh, config: ZeroConfig, device: torch.device
) -> dict[Optimizer, OptimizerKind]:
    """Raise for optimizers that would not train what they should; else how much of a parameter each has to see.

    Every rank calls it.
    """
    _raise_first(StepError, _problems_of_strangers(optimizers, module))
    refuse_unsaved(optimizers, module.trainer)
    on, is_set = stepping_device(config, device), config.optimizer_steps != "auto"
    if config.optimizer_steps == "auto":
        found = on_one_rank(lambda: [optimizer_kind(optimizer, device=on) for optimizer in optimizers])
    else:
        found = [config.optimizer_steps] * len(optimizers)
    kinds = dict(zip(optimizers, found, strict=True))
    # In a trial those that communicate were not understood.
    doubted = [optimizer for optimizer, kind in kinds.items() if is_set or kind == "all"]
    talking = on_one_rank(lambda: [communicates(optimizer, device=on) for optimizer in doubted]) if doubted else []
    refuse_schedules(module.trainer, mesh.shape, config)
    has_parts = mesh.shape.is_model_parallel or (config.stage == 3 and mesh.shape.size("state") > 1)
    for optimizer, talks in zip(doubted, talking, strict=True):
        if talks:
            refuse_collectives(optimizer, kinds[optimizer], mesh.shape, config)
    for optimizer, kind in kinds.items():
        _raise_first(StepError, _problems_of_kind(optimizer, kind, config))
        if has_parts if kind == "all" else steps_parts(mesh.shape, config):
            _raise_first(StepError, _problems_of_identity(optimizer))
    return kinds


def _problems_of_strangers(optimizers: Sequence[Optimizer], module: LightningModule) -> Iterator[str]:
    held = set(module.parameters())
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not has_step_hooks(optimizer):
            yield (
                f"{name} is no torch.optim.Optimizer, or does not call super().__init__(): strategy='3d' needs the"
                " hooks of its step. Derive it from torch.optim.Optimizer."
            )
        if stale := [p for group in optimizer.param_groups for p in group["params"] if p not in held]:
            yield (
                f"{name} holds {len(stale)} parameters that are not the module's (the first of shape"
                f" {tuple(stale[0].shape)}): they are another model's, or the model was made parallel after the"
                " optimizer got its states. Make it in configure_optimizers, from self.parameters()."
            )


def _problems_of_identity(optimizer: Optimizer) -> Iterator[str]:
    """Where an optimizer tells parameters by the objects that they are: a step sees parts in their place."""
    if (name := remembering_attribute(optimizer)) is not None:
        yield (
            f"{type(optimizer).__name__} tells parameters by what is in its attribute {name!r}, but others take the"
            " place of parameters in its steps. Let it tell them by a setting of their group, or by an attribute of"
            " theirs (p.use_muon = True); or use zero.stage=0 without tensor parallel and pipelines."
        )


def _problems_of_kind(optimizer: Optimizer, kind: OptimizerKind, config: ZeroConfig) -> Iterator[str]:
    """Layouts in which a rank has not what an optimizer has to see of parameters in one step."""
    name = type(optimizer).__name__
    together = f"{name} steps all parameters together, or runs training_step several times per step, but with"
    if config.offload_optimizer != "none" and kind == "all":
        yield (
            f"{together} zero.offload_optimizer={config.offload_optimizer!r} they are stepped one window after the"
            " other. Use another optimizer, or zero.offload_optimizer='none'; or set zero.optimizer_steps if it does"
            " not."
        )
