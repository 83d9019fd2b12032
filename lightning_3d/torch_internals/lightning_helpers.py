"""Helpers that Lightning and torchmetrics keep private: of strategies, dataloaders, random states and metrics.

``ThreeDStrategy`` also overrides ``_configure_launcher`` and sets ``_launcher`` and ``_precision_plugin``, as every
strategy does; ``ThreeDPrecision`` overrides ``_wrap_closure`` and calls ``_after_closure``, as Lightning's plugins do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _all_gather_ddp_if_available,
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp,
)
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.logger_connector import result
from torch import Tensor
from torchmetrics import Metric

from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.torch_internals.pytree import tree_unflatten

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


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """The callbacks of a Trainer."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # made by one of its connectors
    return callbacks


def leave_schedulers_to_averaging(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Forget the schedulers where ``StochasticWeightAveraging`` had put its own in their place, as it does itself when
    its state is restored before ``on_fit_start``; it makes its own again and restores that.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, StochasticWeightAveraging):
            state = checkpoint.get("callbacks", {}).get(callback.state_key, {})
            if state.get("scheduler_state") is not None:
                trainer.strategy.lr_scheduler_configs.clear()


def layer_sync_of(strategy: ParallelStrategy) -> LayerSync | None:
    """The Trainer's plugin that converts norms, as ``sync_batchnorm=True`` gives it one."""
    return strategy._layer_sync


@contextmanager
def logging_as_alone() -> Iterator[None]:
    """Let ``self.log`` advise no ``sync_dist=True``, as in one process: for ranks that all log the same."""
    with attributes_replaced(result, {"_distributed_is_initialized": lambda: False}):
        yield


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """The dataloaders of a loop."""

    flat: Sequence[Any]
    is_sequential: bool
    """Whether the loop takes batches of one after the other; else each batch has one of each."""
    _spec: Any

    def structured(self, batches: Sequence[Any]) -> Any:
        """Batches of the loaders in the containers that the loaders came in."""
        return tree_unflatten(list(batches), self._spec)


def active_loaders(trainer: Trainer) -> Loaders | None:
    """The dataloaders of the loop that is about to run; None where it has none."""
    loop = trainer._active_loop
    assert loop is not None
    loop.setup_data()
    combined = loop._combined_loader
    if combined is None or not combined.flattened:
        return None
    return Loaders(flat=combined.flattened, is_sequential=combined._mode == "sequential", _spec=combined._spec)


def before_transfer(module: LightningModule, batch: Any) -> Any:
    """A batch as the user's ``on_before_batch_transfer`` leaves it."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Go on from the same states afterwards, also after an exception, where Lightning's ``isolate_rng`` does not."""
    states = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)


FIXED_NAMES = frozenset({"_defaults", "_persistent", "_reductions", "process_group"})
"""Attributes of a metric that updates do not change."""


def start_anew(metric: Metric) -> None:
    """Give a metric states of their own, as before its first update; those that it has stay as they are."""
    fresh: dict[str, Any] = {
        name: default.detach().clone() if isinstance(default, Tensor) else []
        for name, default in metric._defaults.items()
    }
    vars(metric).update(fresh, _update_count=0, _computed=None)
