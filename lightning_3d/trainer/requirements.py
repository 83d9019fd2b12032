"""Requirements on a model and its optimizers on a given mesh; raises for the rest, alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_3d.checkpoint.atomic import local_path
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.agreement import on_rank_zero
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import ConfigError, StepError
from lightning_3d.model.block_runner import SUMMON, runner_of
from lightning_3d.torch_internals.lightning_helpers import callbacks_of, fetches_itself
from lightning_3d.torch_internals.optimizers import has_step_hooks
from lightning_3d.torch_internals.tensors import has_gradient_hooks
from lightning_3d.zero.optimizer_kind import OptimizerKind, optimizer_kind, steps_apart

NO_FOLDERS = (
    "is on a remote file system, where checkpoint folders can't be written: set save_distributed_checkpoint=False for"
    " files there, or save to a file system that is mounted"
)


def refuse_callbacks(trainer: Trainer, mesh: Mesh) -> None:
    """Raise for callbacks that can't run on this mesh."""
    if mesh.shape.world_size > 1 and any(isinstance(c, BatchSizeFinder) for c in callbacks_of(trainer)):
        raise StepError(
            f"BatchSizeFinder, or Tuner.scale_batch_size, tries batch sizes until memory runs out, but on"
            f" {mesh.shape.world_size} ranks it may run out on one of them, for which the others would wait. Set the"
            " batch size by hand."
        )


def refuse_offload(config: ActivationsConfig, device: torch.device) -> None:
    """Raise for activations that would be moved to where they are."""
    if config.offload and device.type == "cpu":
        raise ConfigError(
            "activations.offload=True moves what blocks keep for their backwards from the memory of an accelerator to"
            f" that of the host, but this run computes on the CPU (device {device}), where they are in host memory from"
            " the start: set it to False, or use Trainer(accelerator='gpu')."
        )


def refuse_places(trainer: Trainer, *, as_folders: bool) -> None:
    """Raise for callbacks that would save where checkpoints can't be.

    Args:
        as_folders: Whether checkpoints are folders.
    """
    for callback in callbacks_of(trainer):
        if not isinstance(callback, ModelCheckpoint) or not callback.dirpath:
            continue
        if as_folders and local_path(callback.dirpath) is None:
            raise ConfigError(f"{type(callback).__name__} saves to {callback.dirpath}, which {NO_FOLDERS}.")
        if "file:" in Path(callback.dirpath).parts:  # Lightning takes a URL for a relative path
            raise ConfigError(
                f"{type(callback).__name__} saves to {callback.dirpath}, a folder of the name 'file:', as it was given"
                " dirpath='file://...', which Lightning takes for a relative path. Give it the path without 'file://'."
            )


def refuse_serving(trainer: Trainer, mesh: Mesh, config: ZeroConfig) -> None:
    """Raise for a callback that runs the model on one rank, in a process of its own."""
    is_in_parts = mesh.shape.is_model_parallel or (config.stage == 3 and mesh.shape.dp > 1)
    # By its name, as its module can't be imported without the package requests.
    classes = {base.__name__ for callback in callbacks_of(trainer) for base in type(callback).__mro__}
    if is_in_parts and "ServableModuleValidator" in classes:
        raise StepError(
            "ServableModuleValidator serves the model from rank 0, but with"
            f" pipeline_parallel_size={mesh.shape.pp}, tensor_parallel_size={mesh.shape.tp} and"
            f" zero.stage={config.stage} on {mesh.shape.dp} replicas each rank has a part of it. Validate it in one"
            " process, from a checkpoint, or use size 1 for both and zero.stage<=2."
        )


def refuse_unplanned(module: LightningModule, config: ActivationsConfig) -> None:
    """Raise for training steps that can't be traced, where a budget of memory is planned by the trace."""
    if not config.plans_memory:
        return
    name, fix = type(module).__name__, "Leave out activations.budget, and activations.recompute='auto'"
    if not module.automatic_optimization:
        raise StepError(
            f"{name} uses manual optimization (automatic_optimization=False), but activations.budget={config.budget!r}"
            f" is planned by a trace of its training_step, before there are optimizers. {fix}, or use automatic"
            " optimization."
        )
    if fetches_itself(module.training_step):
        raise StepError(
            f"{name}.training_step takes dataloader_iter and fetches batches itself, but"
            f" activations.budget={config.budget!r} is planned by a trace of it on an example batch. {fix}, or let it"
            " take the batch: def training_step(self, batch, batch_idx)."
        )


def refuse_unsupported(module: LightningModule, mesh: Mesh, config: ZeroConfig, mode: str) -> None:
    """Raise for what can't run on this mesh.

    Args:
        mode: Of the pipeline.
    """
    _refuse_uninitialized(module)
    if mode == "microbatched" and mesh.shape.pp > 1 and not module.automatic_optimization:
        raise StepError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False), but pipeline stages run"
            " forward and backward together in microbatches: set pipeline.mode=inline, or leave it out."
        )
    if mesh.shape.is_model_parallel:
        _refuse_fetching(module, mesh)
    is_fully_sharded = config.stage == 3 and (mesh.shape.dp > 1 or config.offload_params != "none")
    if mesh.shape.is_model_parallel or is_fully_sharded:
        _refuse_lost(module)
    if mesh.shape.world_size > 1:
        _refuse_sparse(module)
    if any(runner_of(inner) is not None or isinstance(inner, FSDPModule) for inner in module.modules()):
        raise StepError(
            f"{type(module).__name__} is a copy of a model that was made parallel before, and has parts of it. Copy"
            f" that one {SUMMON}."
        )


def _refuse_uninitialized(module: LightningModule) -> None:
    """Raise for lazy modules of torch, as DDP does: planning needs the shapes of parameters."""
    lazy = [fqn for fqn, tensor in (*module.named_parameters(), *module.named_buffers()) if is_lazy(tensor)]
    if lazy:
        raise StepError(
            f"{lazy[0]} of {type(module).__name__} has no shape yet, as it is of a lazy module. Run it once on an"
            " example batch before the Trainer does, or in configure_model, or use a module that is told its sizes."
        )


def _refuse_fetching(module: LightningModule, mesh: Mesh) -> None:
    """Raise for steps that fetch their batches themselves."""
    for name in ("training_step", "validation_step", "test_step", "predict_step"):
        if fetches_itself(getattr(module, name)):
            raise StepError(
                f"{type(module).__name__}.{name} takes dataloader_iter and fetches batches itself, but with"
                f" pipeline_parallel_size={mesh.shape.pp} and tensor_parallel_size={mesh.shape.tp} each batch is split,"
                f" or compared between ranks, before the step. Let it take the batch: def {name}(self, batch,"
                " batch_idx), or use size 1 for both."
            )


def _refuse_lost(module: LightningModule) -> None:
    """Raise for what hangs on parameters that shards take the place of."""
    for fqn, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            raise StepError(
                f"{fqn} has gradient hooks, which would be lost: shards take the place of parameters. Change gradients"
                " in on_before_optimizer_step instead."
            )


def _refuse_sparse(module: nn.Module) -> None:
    for fqn, inner in module.named_modules():
        if isinstance(inner, nn.Embedding | nn.EmbeddingBag) and inner.sparse:
            raise StepError(
                f"{fqn} is an {type(inner).__name__}(sparse=True), whose gradients have no sharded form. Use"
                " sparse=False."
            )


def check_optimizers(
    optimizers: Sequence[Optimizer], module: LightningModule, mesh: Mesh, config: ZeroConfig, device: torch.device
) -> dict[Optimizer, OptimizerKind]:
    """Raise for optimizers that would not train what they should; else how much of a parameter each has to see.

    Every rank calls it.
    """
    _refuse_strangers(optimizers, module)
    cuts = (0, 1) if mesh.shape.tp > 1 else (0,)
    if config.optimizer_steps == "auto":
        on = device if config.offload_optimizer == "none" else torch.device("cpu")
        found = on_rank_zero(
            lambda: [optimizer_kind(optimizer, cuts=cuts, device=on) for optimizer in optimizers], device
        )
    else:
        found = [config.optimizer_steps] * len(optimizers)
    kinds = dict(zip(optimizers, found, strict=True))
    for optimizer, kind in kinds.items():
        _refuse_layout(type(optimizer).__name__, kind, mesh, config)
        if config.offload_optimizer != "none":
            _check_offloaded(optimizer, kind, config)
    return kinds


def saves_optimizers(trainer: Trainer) -> bool:
    """Whether checkpoints that callbacks save by themselves hold the states of optimizers."""
    return any(isinstance(c, ModelCheckpoint) and not c.save_weights_only for c in callbacks_of(trainer))


def _refuse_strangers(optimizers: Sequence[Optimizer], module: LightningModule) -> None:
    held = set(module.parameters())
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if not has_step_hooks(optimizer):
            raise StepError(
                f"{name} is no torch.optim.Optimizer, or does not call super().__init__(): strategy='3d' needs the"
                " hooks of its step. Derive it from torch.optim.Optimizer."
            )
        stale = [p for group in optimizer.param_groups for p in group["params"] if p not in held]
        if stale:
            raise StepError(
                f"{name} holds {len(stale)} parameters that are not the module's (the first of shape"
                f" {tuple(stale[0].shape)}): they are another model's, or the model was made parallel after the"
                " optimizer got its states. Make it in configure_optimizers, from self.parameters()."
            )


def _refuse_layout(name: str, kind: OptimizerKind, mesh: Mesh, config: ZeroConfig) -> None:
    if kind == "all" and mesh.shape.is_model_parallel:
        raise StepError(
            f"{name} steps all parameters together, or runs training_step several times per step, but with"
            f" pipeline_parallel_size={mesh.shape.pp} and tensor_parallel_size={mesh.shape.tp} no rank has them"
            " all. Use another optimizer, or size 1 for both; or set zero.optimizer_steps if it does not."
        )
    is_sharded = mesh.shape.tp > 1 or (config.stage == 3 and mesh.shape.dp > 1)
    if kind != "rows" and is_sharded:
        raise StepError(
            f"{name} needs whole parameters (it does not work element by element), but with"
            f" tensor_parallel_size={mesh.shape.tp} and zero.stage={config.stage} on {mesh.shape.dp} replicas each"
            " rank has a part of them. Use another optimizer, or tensor_parallel_size=1 and zero.stage<=2; or set"
            " zero.optimizer_steps='rows' if it does work element by element."
        )


def _check_offloaded(optimizer: Optimizer, kind: OptimizerKind, config: ZeroConfig) -> None:
    """Raise for optimizers that can't step parameters window by window."""
    name = type(optimizer).__name__
    if kind == "all" or (config.optimizer_steps == "auto" and not steps_apart(optimizer)):
        raise StepError(
            f"{name} steps all parameters together, or runs training_step several times per step, but with"
            f" zero.offload_optimizer={config.offload_optimizer!r} they are stepped one window after the other. Use"
            " another optimizer, or zero.offload_optimizer='none'; or set zero.optimizer_steps if it does not."
        )
    if any(group.get("capturable") for group in optimizer.param_groups):
        raise StepError(
            f"{name} has capturable=True, for steps on an accelerator, but with"
            f" zero.offload_optimizer={config.offload_optimizer!r} it steps on the CPU. Leave one of them out."
        )
