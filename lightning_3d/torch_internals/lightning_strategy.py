"""Helpers that Lightning's own strategies share under private names: processes, their connection, collectives.

``ThreeDStrategy`` also overrides ``_configure_launcher`` and sets ``_launcher`` and ``_precision_plugin``, as every
strategy does.
"""

from __future__ import annotations

from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp,
)
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

ScriptLauncher = _SubprocessScriptLauncher
"""Starts the other processes of a node by running the script again."""

connect = _init_dist_connection
"""Make the default process group, and let it be destroyed at exit."""

default_backend = _get_default_process_group_backend_for_device
"""NCCL, gloo or another backend, for a device."""

reduce_tensor = _sync_ddp
"""Sum or average a tensor over a process group."""

gather_tensor = _all_gather_ddp_if_available
"""Stack the tensors of a process group, with or without gradients."""

set_device = _update_properties
"""Tell a LightningModule, its children and its metrics the device and dtype that they report."""


def reset_optimizers(strategy: ParallelStrategy) -> None:
    """Forget the optimizers and schedulers of an earlier fit."""
    strategy._reset_optimizers_and_schedulers()


def is_syncing_batchnorm(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer was asked to convert BatchNorm."""
    return strategy._layer_sync is not None
