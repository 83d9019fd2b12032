"""BatchNorm that normalises by the batches of all replicas: ``Trainer(sync_batchnorm=True)`` and SyncBatchNorm.

Lightning's plugin converts the modules, as under DDP. They stay so after the fit, as the strategy keeps the model.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.torch_internals.modules import BatchNorm

_LEAVE_OUT = "Without it each replica normalises by its own batch, as under DDP."


def refusal_of_synced_norms(
    module: LightningModule, plugin: LayerSync | None, shape: MeshShape, device_type: str
) -> str | None:
    """Why this model's norms can't be trained in step with those of other replicas, if they are to be and can't.

    Args:
        plugin: The Trainer's, which converts norms.
    """
    norms = {fqn: norm for fqn, norm in module.named_modules() if isinstance(norm, BatchNorm)}
    synced = [fqn for fqn, norm in norms.items() if isinstance(norm, nn.SyncBatchNorm) and norm.training]
    asks = plugin is not None and shape.dp > 1 and bool(norms)
    if not asks and not synced:
        return None
    what = f"Trainer(sync_batchnorm=True) for {next(iter(norms))}" if asks else f"{synced[0]}, a SyncBatchNorm,"
    if shape.is_model_parallel:
        return (
            f"{what} communicates inside of a block, but with pipeline_parallel_size={shape.pp} and"
            f" tensor_parallel_size={shape.tp} blocks are traced, where they can't. Use size 1 for both, or leave it"
            f" out. {_LEAVE_OUT}"
        )
    if device_type == "cpu" and (synced or type(plugin) is TorchSyncBatchNorm):
        return (
            f"{what} needs torch's SyncBatchNorm, which does not run on CPUs, under DDP neither: leave it out there."
            f" {_LEAVE_OUT}"
        )
    return None
