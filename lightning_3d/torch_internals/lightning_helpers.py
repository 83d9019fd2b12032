"""Helpers that Lightning and torchmetrics keep private: of strategies, dataloaders and metrics.

``ThreeDStrategy`` also overrides ``_configure_launcher`` and sets ``_launcher`` and ``_precision_plugin``, as every
strategy does; ``ThreeDPrecision`` overrides ``_wrap_closure`` and calls ``_after_closure``, as Lightning's plugins do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp,
)
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core import saving
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.plugins import LayerSync, TorchCheckpointIO
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector import result
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from lightning.pytorch.utilities.types import LRSchedulerConfig
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import tree_unflatten

connect = _init_dist_connection
"""Make the default process group, and let it be destroyed at exit."""

Handler = Callable[[int, FrameType | None], None]
"""Handles a signal."""

default_backend = _get_default_process_group_backend_for_device
"""NCCL, gloo or another backend, for a device."""

reduce_tensor = _sync_ddp
"""Sum or average a tensor over a process group."""

set_device = _update_properties
"""Tell a LightningModule, its children and its metrics the device and dtype that they report."""


def load_folders(read: Callable[[object, object, bool | None], dict[str, object] | None]) -> None:
    """Let ``load_from_checkpoint`` take what ``read(path, map_location, weights_only)`` gives, unless that is None."""
    load = saving.pl_load  # type: ignore[attr-defined]  # not exported

    def pl_load(path: Any, map_location: Any = None, weights_only: bool | None = None) -> object:
        read_here = read(path, map_location, weights_only)
        return load(path, map_location=map_location, weights_only=weights_only) if read_here is None else read_here

    saving.pl_load = pl_load  # type: ignore[attr-defined, assignment]


def has_own_io(strategy: ParallelStrategy) -> bool:
    """Whether the Trainer was given a ``CheckpointIO``."""
    return type(strategy._checkpoint_io) not in (type(None), TorchCheckpointIO)


def uploading_loggers(trainer: Trainer) -> list[str]:
    """The classes of the Trainer's loggers that are to upload checkpoints, where these are files."""
    return [type(logger).__name__ for logger in trainer.loggers if getattr(logger, "_log_model", False)]


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


def leave_out_module_names(trainer: Trainer) -> None:
    """Let the Trainer's PyTorchProfiler record no names of modules, with a warning.

    It pairs a hook before each module's forward with one after it, but traces, and other ranks, run one of both.
    """
    profiler = vars(trainer)["profiler"]
    if not isinstance(profiler, PyTorchProfiler) or not profiler._record_module_names:
        return
    profiler._record_module_names = False
    if profiler._register is not None:
        profiler._register.__exit__(None, None, None)
    rank_zero_warn(
        "PyTorchProfiler records operators, but no names of modules with a pipeline, tensor parallel or"
        " activations.budget, where forwards of some of them are traced or run on other ranks."
        " record_module_names=False leaves out this warning."
    )


@contextmanager
def signals_noted(trainer: Trainer, on_stop: Handler, on_requeue: Handler) -> Iterator[None]:
    """Let these be called for SIGTERM and, under SLURM, for the signal that asks to requeue, where Lightning would run
    collectives in the handlers. Entered before the Trainer registers its handlers.
    """
    new = {"_sigterm_notifier_fn": on_stop, "_slurm_sigusr_handler_fn": on_requeue}
    with replaced("signals", trainer._signal_connector, new):
        yield


def put_back_at_end(trainer: Trainer, signum: int, handler: Handler | int | None) -> None:
    """Let the Trainer put back this handler of a signal, and not the one that it found."""
    if trainer._signal_connector._original_handlers:  # it has registered its own
        trainer._signal_connector._original_handlers[signum] = handler


def is_compiled_whole(module: LightningModule) -> bool:
    """Whether it was given to the Trainer as ``torch.compile(module)``, so that its steps are compiled functions."""
    return module._compiler_ctx is not None


@contextmanager
def called_before_batches(trainer: Trainer, before_batch: Callable[[], None]) -> Iterator[None]:
    """Let this be called before every training batch, where Lightning would broadcast whether rank 0 got SIGTERM."""
    with replaced("batches", trainer.fit_loop.epoch_loop, {"_broadcast_sigterm_tensor": before_batch}):
        yield


def stop_in_time(trainer: Trainer) -> None:
    """Let Lightning's loops raise ``SIGTERMException`` at the next place where they look for it."""
    trainer._signal_connector.received_sigterm = True


def requeue(trainer: Trainer, signum: int) -> None:
    """Save a checkpoint and have SLURM run the job again. Every rank calls it."""
    connector: Any = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signum, None)


def last_checkpoint(trainer: Trainer) -> str | Path | None:
    """The checkpoint that ``trainer.fit(ckpt_path="last")`` restores; warns where there is none."""
    connector = trainer._checkpoint_connector
    return connector._parse_ckpt_path(TrainerFn.FITTING, "last", model_provided=True, model_connected=True)


@contextmanager
def restored_from(trainer: Trainer, path: str | Path | None) -> Iterator[None]:
    """Let a fit restore this checkpoint where it was given none."""
    connector = trainer._checkpoint_connector
    resume_start = connector.resume_start

    def resumed(checkpoint_path: str | Path | None = None, weights_only: bool | None = None) -> None:
        resume_start(checkpoint_path or path, weights_only)

    with replaced("restarts", connector, {"resume_start": resumed}):
        yield


def is_for_requeue(path: str) -> bool:
    """Whether a checkpoint is that which the Trainer saves before it has SLURM run the job again."""
    return os.path.basename(path).startswith("hpc_ckpt_")


@contextmanager
def torn_down_anyway(trainer: Trainer) -> Iterator[None]:
    """Let a Trainer whose run has failed tear down also where a hook or a logger that it tells of that raises."""
    interrupt = call._interrupt

    def interrupted(failed: Trainer, exception: BaseException) -> None:
        try:
            interrupt(failed, exception)
        except BaseException:
            if failed is trainer:
                failed._teardown()
            raise

    with replaced("interrupts", call, {"_interrupt": interrupted}):
        yield


@contextmanager
def logging_as_alone() -> Iterator[None]:
    """Let ``self.log`` advise no ``sync_dist=True``, as in one process: for ranks that all log the same."""
    with replaced("advice on logs", result, {"_distributed_is_initialized": lambda: False}):
        yield


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """The dataloaders of a loop."""

    flat: Sequence[object]
    is_sequential: bool
    """Whether the loop takes batches of one after the other; else each batch has one of each."""
    _spec: Any

    def structured(self, batches: Sequence[object]) -> object:
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


@contextmanager
def samplers_noted(trainer: Trainer) -> Iterator[list[bool]]:
    """For each training dataloader that is set up inside, whether the Trainer gives it a sampler by rank."""
    connector, found = trainer._data_connector, list[bool]()
    decide = connector._requires_distributed_sampler

    def noted(dataloader: Any) -> bool:
        found.append(decide(dataloader))
        return found[-1]

    with replaced("samplers", connector, {"_requires_distributed_sampler": noted}):
        yield found


@contextmanager
def training_samplers_changed(trainer: Trainer, change: Callable[[DataLoader[Any], object], object]) -> Iterator[None]:
    """Let training dataloaders have ``change(dataloader, sampler)`` for the sampler that the Trainer makes for them."""
    connector = trainer._data_connector
    resolve = connector._resolve_sampler

    def changed(dataloader: DataLoader[Any], shuffle: bool, mode: RunningStage | None = None) -> object:
        sampler = resolve(dataloader, shuffle=shuffle, mode=mode)
        return change(dataloader, sampler) if mode == RunningStage.TRAINING else sampler

    with replaced("order of samples", connector, {"_resolve_sampler": changed}):
        yield


def forget_loaders(trainer: Trainer) -> None:
    """Let the dataloaders of a fit be made again, for another number of replicas."""
    loop = trainer.fit_loop
    if loop._data_fetcher is not None:
        loop._data_fetcher.teardown()
    loop._combined_loader = loop._data_fetcher = loop.epoch_loop.val_loop._combined_loader = None


def change_loaders(trainer: Trainer, change: Callable[[Any], object]) -> None:
    """Let the loop that is about to run take others in place of its dataloaders, which it has made."""
    loop = trainer._active_loop
    assert loop is not None
    assert loop._combined_loader is not None
    loop._combined_loader.flattened = list(map(change, loop._combined_loader.flattened))


def fetched_ahead(trainer: Trainer) -> list[object]:
    """The batches that training has fetched before it starts, as it does from dataloaders without a length."""
    fetcher = trainer.fit_loop._data_fetcher
    return [batch for batch, *_ in fetcher.batches] if isinstance(fetcher, _PrefetchDataFetcher) else []


def load_loader_states(trainer: Trainer) -> None:
    """Give dataloaders that a fit made before its loops were restored the states that a checkpoint has of them."""
    loop = trainer.fit_loop
    if loop._combined_loader_states_to_load and loop._data_fetcher is not None:
        loop._load_combined_loader_states()
        iter(loop._data_fetcher)  # the iterators were made, too


def fetches_itself(step: Callable[..., object]) -> bool:
    """Whether a step takes the iterator over the dataloader in place of a batch."""
    return is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def further_arguments(trainer: Trainer, step: Callable[..., object]) -> tuple[int, ...]:
    """The arguments after the batch in the first call of a step that a loop makes."""
    index = (0,) if takes_batch_index(step) else ()
    loaders = active_loaders(trainer)
    tells_loader = trainer.state.fn != TrainerFn.FITTING and loaders is not None and len(loaders.flat) > 1
    return (*index, 0) if tells_loader and loaders is not None and loaders.is_sequential else index


def takes_batch_index(step: Callable[..., object]) -> bool:
    """Whether a loop calls a step with the number of the batch."""
    return bool(is_param_in_hook_signature(step, "batch_idx", min_args=2))


def make_optimizers(module: LightningModule) -> tuple[list[Optimizer], list[LRSchedulerConfig]]:
    """The optimizers and schedulers that the module configures, as a strategy holds them."""
    return _init_optimizers_and_lr_schedulers(module)


def set_up_validation(trainer: Trainer) -> None:
    """Make the dataloaders of the validation in ``fit``, if it has one, which it makes later else."""
    if trainer.enable_validation:
        trainer.fit_loop.epoch_loop.val_loop.setup_data()


def before_transfer(module: LightningModule, batch: object) -> object:
    """A batch as the user's ``on_before_batch_transfer`` leaves it."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)


FIXED_NAMES = frozenset({"_defaults", "_persistent", "_reductions", "process_group"})
"""Attributes of a metric that updates do not change."""


def start_anew(metric: Metric) -> None:
    """Give a metric states of their own, as before its first update; those that it has stay as they are."""
    fresh: dict[str, object] = {
        name: default.detach().clone() if isinstance(default, Tensor) else []
        for name, default in metric._defaults.items()
    }
    vars(metric).update(fresh, _update_count=0, _computed=None)
