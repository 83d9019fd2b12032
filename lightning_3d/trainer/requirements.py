"""Requirements on a model and its optimizers on a given mesh; raises for the rest, alike on all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import LBFGS, Optimizer

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import runner_of
from lightning_3d.torch_internals.tensors import has_gradient_hooks


def refuse_unsupported(module: LightningModule, mesh: Mesh, *, sync_batchnorm: bool) -> None:
    """Raise for what can't run on this mesh."""
    if mesh.shape.pp * mesh.shape.tp > 1 and not module.automatic_optimization:
        raise StepError(
            f"{type(module).__name__} uses manual optimization (automatic_optimization=False), but with"
            f" pipeline_parallel_size={mesh.shape.pp} and tensor_parallel_size={mesh.shape.tp} its training_step is"
            " traced before there are optimizers, and pipeline stages run forward and backward together. Use automatic"
            " optimization, or size 1 for both."
        )
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]  # made by one of its connectors
    averaging = [c for c in callbacks if isinstance(c, (StochasticWeightAveraging, WeightAveraging))]
    if mesh.shape.pp * mesh.shape.tp > 1 and averaging:
        raise StepError(
            f"{type(averaging[0]).__name__} copies the whole module and averages all of its parameters, but with"
            f" pipeline_parallel_size={mesh.shape.pp} and tensor_parallel_size={mesh.shape.tp} each rank holds a part."
            " Remove the callback, or use size 1 for both."
        )
    if mesh.shape.world_size > 1:
        _refuse_lost(module)
    if sync_batchnorm:
        raise StepError(
            "Trainer(sync_batchnorm=True) is not built yet for strategy='3d'. Without pipeline and tensor parallel you"
            " can call torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) yourself (GPUs only)."
        )
    if any(runner_of(inner) is not None or isinstance(inner, FSDPModule) for inner in module.modules()):
        raise StepError(
            f"{type(module).__name__} was made parallel before. Build a new model for a new Trainer or strategy, and"
            " load a checkpoint into it."
        )


def _refuse_lost(module: LightningModule) -> None:
    """Raise for what hangs on parameters that shards take the place of."""
    for fqn, parameter in module.named_parameters():
        if has_gradient_hooks(parameter):
            raise StepError(
                f"{fqn} has gradient hooks, which would be lost: shards take the place of parameters. Change gradients"
                " in on_before_optimizer_step instead."
            )
    for fqn, inner in module.named_modules():
        if isinstance(inner, nn.Embedding) and inner.sparse:
            raise StepError(
                f"{fqn} is an Embedding(sparse=True), whose gradients have no sharded form. Use sparse=False."
            )


def check_optimizers(optimizers: Sequence[Optimizer], module: LightningModule, mesh: Mesh) -> None:
    """Raise for optimizers that would not train what they should."""
    held = set(module.parameters())
    for optimizer in optimizers:
        name = type(optimizer).__name__
        stale = [p for group in optimizer.param_groups for p in group["params"] if p not in held]
        if stale:
            raise StepError(
                f"{name} holds {len(stale)} parameters that are not the module's (the first of shape"
                f" {tuple(stale[0].shape)}): the model was made parallel after the optimizer was made. Make it in"
                " configure_optimizers, from self.parameters()."
            )
        if mesh.shape.pp * mesh.shape.tp > 1 and isinstance(optimizer, LBFGS):
            raise StepError(
                f"{name} runs training_step several times per step and needs all gradients in one place, but"
                f" pipeline_parallel_size={mesh.shape.pp} and tensor_parallel_size={mesh.shape.tp}. Use another"
                " optimizer, or size 1 for both."
            )
        at_once = [key for key in ("fused", "foreach") if any(group.get(key) for group in optimizer.param_groups)]
        if mesh.shape.tp > 1 and at_once:
            raise StepError(
                f"{name}({at_once[0]}=True) steps all parameters in one call, but with"
                f" tensor_parallel_size={mesh.shape.tp} they lie on several meshes. Leave it out."
            )
