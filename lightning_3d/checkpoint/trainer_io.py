"""``ThreeDCheckpointIO``: saves and loads the checkpoints of a Trainer whose ranks hold parts of the model.

Lightning asks for the model's state, for those of the optimizers, and then hands over the whole checkpoint:

    folder                                this rank's parts            every rank writes what it has
    file                                  this rank's parts            rank 0 gathers a tensor, writes it, and so on
    file whose model's state hooks see    full tensors on all ranks    rank 0 writes it
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint.atomic import local_path, published_path, remove
from lightning_3d.checkpoint.box import is_part
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.checkpoint.content import MODEL, OPTIMIZERS, Content, content_of, joined
from lightning_3d.checkpoint.folder import folder_content
from lightning_3d.checkpoint.gathering import Gathering
from lightning_3d.checkpoint.lazy import SavedState, made
from lightning_3d.checkpoint.loading import read_checkpoint
from lightning_3d.checkpoint.match import check_is_lightning
from lightning_3d.checkpoint.optimizer_states import load_optimizers, optimizer_state, parameters_of
from lightning_3d.checkpoint.own_state import like_state, load_model, state_for_hooks, state_of, tied_fqns
from lightning_3d.checkpoint.run_state import RUN
from lightning_3d.checkpoint.saves import Saves
from lightning_3d.checkpoint.writing import write_file, write_folder
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import CheckpointError, ConfigError
from lightning_3d.frames import is_in_signal_handler
from lightning_3d.memory.rank_memory import GIB, size_text
from lightning_3d.sharding.placement import interleaved_parameters
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.launchers import RunLauncher
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.waits import long_wait
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.shard import NO_SHARDS, Shards

_NO_FOLDERS = (
    "is on a remote file system, where checkpoint folders can't be written: set save_distributed_checkpoint=False for"
    " files there, or save to a file system that is mounted"
)


class ThreeDCheckpointIO(CheckpointIO):
    """Saves and loads a Trainer's checkpoints; every rank calls its methods.

    Args:
        strategy: Has the model and the optimizers. A ``CheckpointIO`` of the user's writes and reads files in place of
            this one.
        timeout: The timeout of collectives in the background.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        config: ThreeDConfig,
        timeout: timedelta,
    ) -> None:
        self._strategy, self._config = strategy, config
        self.saves = Saves(config.checkpoint, timeout)
        self.is_training = False
        """Whether training goes on after a save, which may then be in the background."""
        self._pp: DeviceMesh | None = None
        self._zero: Zero | None = None
        self._writes_folders = config.save_distributed_checkpoint is True

    def begin(self, trainer: Trainer, mesh: Mesh, zero: Zero) -> None:
        """Choose files or folders for a run, whose model is parallel.

        Raises:
            ConfigError: a callback would save where they can't be.
        """
        self._pp, self._zero = mesh.axis("pp"), zero
        if self._config.save_distributed_checkpoint == "auto" and not self._is_users:
            num_bytes = on_one_rank(lambda: _file_bytes(self._module, self._strategy.optimizers))
            self._writes_folders = is_too_large(num_bytes, self._config.checkpoint.max_file_size)
        for callback in lightning_helpers.callbacks_of(trainer) if self._writes_folders else ():
            if isinstance(callback, ModelCheckpoint) and callback.dirpath and local_path(callback.dirpath) is None:
                raise ConfigError(f"{type(callback).__name__} saves to {callback.dirpath}, which {_NO_FOLDERS}.")
        if self._writes_folders and (names := lightning_helpers.uploading_loggers(trainer)):
            rank_zero_warn(
                f"{', '.join(names)} uploads checkpoint files (log_model), but checkpoints of this run are folders,"
                " which it leaves out: set save_distributed_checkpoint=False for files."
            )

    @property
    def _module(self) -> LightningModule:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    @property
    def _shards(self) -> Shards:
        return NO_SHARDS if self._zero is None else self._zero.stepped

    @property
    def _is_users(self) -> bool:
        """Whether files are written and read by a ``CheckpointIO`` of the user's."""
        return lightning_helpers.has_own_io(self._strategy)

    # ---- saving

    @long_wait("Gathering the model for a checkpoint")
    def model_state(self) -> dict[str, object]:
        """The model's state for a checkpoint, under all names that one process saves: this rank's parts, or, where it
        goes to a file and hooks of the user's may look at it, full values on all ranks.
        """
        shown = state_for_hooks(self._module)
        if self._writes_folders or not _hooks_see_saving(self._module):
            return shown
        gathering = Gathering(content_of({MODEL: shown}, interleaved_parameters(self._module)).values)
        full: dict[str, object] = (
            gathering.with_peers_serving(lambda: made(joined(gathering.values(), {}, None)[MODEL])) or {}
        )
        broadcast = self._strategy.broadcast
        return like_state(shown, {name: broadcast(full.get(name)) for name in broadcast(list(full))})

    @long_wait("Gathering the optimizer's state for a checkpoint")
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """This rank's part of the state of an optimizer for a checkpoint."""
        own: dict[str, object] = {}
        with collective_errors("gather the optimizer's state"):
            own = optimizer_state(self._module, optimizer, self._shards)
        return own

    @override
    @long_wait("Saving a checkpoint")
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: object = None
    ) -> None:
        """Write a checkpoint, now or in the background.

        Raises:
            CheckpointError: it can't be written; on all ranks.
        """
        path, is_on_signal = self._strategy.broadcast((os.fspath(path), is_in_signal_handler()))
        # The process may end as soon as a handler returns, and the job once it is to be requeued.
        is_last = is_on_signal or lightning_helpers.is_for_requeue(path)
        goes_on = self.is_training and self._module.trainer.state.status == TrainerStatus.RUNNING and not is_last
        self.saves.wait()
        content = content_of(checkpoint, interleaved_parameters(self._module))
        if not self._writes_folders:
            self._save_file(checkpoint, content, path, storage_options, goes_on)
            return
        if (folder := local_path(path)) is None:
            raise CheckpointError(f"{path} {_NO_FOLDERS}.")
        if storage_options is not None:
            raise CheckpointError(
                "storage_options are for a CheckpointIO, but a checkpoint folder is written without one: give the"
                " Trainer one (plugins=[...]), which writes files."
            )
        written = folder_content(content, self._pp, tied_fqns(self._module))
        self.saves.save(written, partial(write_folder, folder), goes_on)

    def _save_file(
        self, checkpoint: Mapping[str, Any], content: Content, path: str, storage_options: object, goes_on: bool
    ) -> None:
        gathering, file = Gathering(content.values), self._own_path(path) if storage_options is None else None
        full: dict[str, Any] | None = None
        if self._strategy.is_global_zero:
            states = checkpoint.get(OPTIMIZERS)
            gathered = joined(gathering.values(), content.metadata, None if states is None else len(states))
            full = {key: gathered[key] for key in checkpoint}  # in the order of one process
            full[MODEL] = like_state(checkpoint[MODEL], full[MODEL])
        is_lazy = file is not None and not self._config.checkpoint.async_save
        if not is_lazy:
            full = gathering.with_peers_serving(lambda: made(full))

        def put(full: Any) -> None:
            if file is not None:
                write_file(full, file)
            else:
                self._strategy.checkpoint_io.save_checkpoint(full, path, storage_options)

        def write(full: dict[str, object] | None, group: dist.ProcessGroup | None) -> None:
            with collective_errors(f"write the checkpoint {path}", group):
                if is_lazy:
                    gathering.with_peers_serving(lambda: put(full))
                elif self._strategy.is_global_zero:
                    put(full)

        self.saves.save(full, write, goes_on)

    @override
    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        if self._strategy.is_global_zero:
            self.saves.once_saved(partial(self._remove, os.fspath(path)))

    def _remove(self, path: str) -> None:
        if (own := self._own_path(path)) is not None and os.path.lexists(own):
            remove(own)
        else:
            self._strategy.checkpoint_io.remove_checkpoint(path)

    def _own_path(self, path: str | os.PathLike[str]) -> Path | None:
        """Where this one writes a checkpoint; None where another ``CheckpointIO`` does: the user's, or Lightning's to
        remote file systems.
        """
        return None if self._is_users else local_path(path)

    # ---- loading

    @override
    @long_wait("Checking and reading the checkpoint")
    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any layout; the model and its optimizers are filled when Lightning has given the user's
        ``on_load_checkpoint`` its turn.

        Args:
            path: A file or a folder.
            map_location: Of no effect: values go where the model has them.
            weights_only: As in ``torch.load``; by default as ``fit`` and the like were given it.
        """
        path = self._strategy.broadcast(path)
        self.saves.wait()
        launcher = self._strategy.launcher
        if weights_only is None and isinstance(launcher, RunLauncher):
            weights_only = launcher.weights_only
        local = local_path(path)
        local = None if local is None else on_one_rank(partial(published_path, local))
        if local is not None and (not self._is_users or on_one_rank(local.is_dir)):
            checkpoint = read_checkpoint(local, self._module, weights_only=weights_only)
        else:
            if not self._is_users:  # Lightning would unpickle anything that comes by http
                weights_only = weights_only is not False
            checkpoint = self._strategy.checkpoint_io.load_checkpoint(os.fspath(path), weights_only=weights_only)
        check_is_lightning(checkpoint, path)
        lightning_helpers.leave_schedulers_to_averaging(self._module.trainer, checkpoint)
        return checkpoint

    @long_wait("Loading the model from the checkpoint")
    def load_model(self, checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Fill the model from a checkpoint that ``load_checkpoint`` gave."""
        state = checkpoint[MODEL]
        load_model(state, self._module, strict=strict)
        metadata = {key: value for key, value in checkpoint.items() if key not in (MODEL, OPTIMIZERS)}
        if isinstance(state, SavedState) and any(map(is_part, tree_leaves(metadata))):
            assert isinstance(checkpoint, dict)
            checkpoint[MODEL] = state_of(self._module)  # callbacks that average weights go on from parts, too

    @long_wait("Loading the optimizers from the checkpoint")
    def load_optimizers(self, checkpoint: Mapping[str, Any]) -> None:
        """Fill the optimizers from a checkpoint that ``load_checkpoint`` gave."""
        if states := checkpoint["optimizer_states"]:  # hooks empty it for optimizers that start anew
            strict, optimizers = self._module.strict_loading, self._strategy.optimizers
            saved_as = (checkpoint.get(RUN) or {}).get("optimizers", ())
            load_optimizers(states, self._module, optimizers, strict=strict, shards=self._shards, saved_as=saved_as)

    @override
    def teardown(self) -> None:
        self.is_training = False
        self.saves.close()


def _hooks_see_saving(module: LightningModule) -> bool:
    """Whether code that is not Lightning's gets the checkpoints that are saved."""
    callbacks = lightning_helpers.callbacks_of(module.trainer)
    hooks = [module.on_save_checkpoint, *(callback.on_save_checkpoint for callback in callbacks)]
    return any(not (getattr(hook, "__module__", None) or "").startswith("lightning.pytorch.") for hook in hooks)


def _file_bytes(module: LightningModule, optimizers: Sequence[Optimizer]) -> int:
    """About how many bytes a file of the whole model and its optimizers would have, if these were Adam."""
    tensors = {tensor for _, tensor, _ in named_state(module)}
    trained = [p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(2 * 4 * p.numel() for p in trained)


def is_too_large(num_bytes: int, max_file_size: float) -> bool:
    """Whether a file would be larger than the setting `checkpoint.max_file_size`, in GiB; tells so on rank 0."""
    if num_bytes <= max_file_size * GIB:
        return False
    rank_zero_info(
        f"Checkpoints become folders that every rank writes its part of, as one file would have about"
        f" {size_text(num_bytes)} and checkpoint.max_file_size is {max_file_size:g} GiB. Set"
        " save_distributed_checkpoint=False for files nevertheless."
    )
    return True
