"""Saves in the background, saves that fail, and the removal of what they replace."""

from __future__ import annotations

import contextlib
import logging
import resource
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.serialization import get_crc32_options

from lightning_3d import ConfigError
from lightning_3d.checkpoint import gathering, read_folder, trainer_io
from lightning_3d.checkpoint.loading import verify_checkpoint
from lightning_3d.checkpoint.trainer_io import is_too_large
from lightning_3d.checkpoint.writing import write_folder
from lightning_3d.errors import CheckpointError
from lightning_3d.memory.rank_memory import GIB
from tests.models import TinyMLP, features, training_loader
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

LAYOUTS = [Layout(dp=2, zero=3, save_distributed_checkpoint=True), Layout(pp=2)]
IN_BACKGROUND = Layout(dp=2, save_distributed_checkpoint=True, checkpoint={"async_save": True})
NUM_STEPS = 4
WIDTH = 160  # some 100 kB of weights
FULL_AT = 60_000  # bytes


def _data(layout: Layout) -> Any:
    return training_loader(features(4 * NUM_STEPS), global_batch_size=4, data_parallel_size=layout.dp)


def _trainer(layout: Layout, *callbacks: Callback, **settings: Any) -> L.Trainer:
    used = {**QUIET, "max_epochs": 1, "devices": layout.world_size, "callbacks": [*callbacks], **settings}
    return L.Trainer(strategy=layout.strategy(), **used)


def _fit(layout: Layout, *callbacks: Callback, ckpt_path: Path | None = None, **settings: Any) -> L.Trainer:
    L.seed_everything(1, verbose=False)
    trainer = _trainer(layout, *callbacks, **settings)
    trainer.fit(TinyMLP(width=WIDTH), _data(layout), ckpt_path=ckpt_path)
    return trainer


def _every_step(dirpath: str = "saved", **settings: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=dirpath, filename="{step}", every_n_train_steps=1, **settings)


def _names(folder: str = "saved") -> list[str]:
    dist.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


def _weights(path: Path) -> dict[str, Tensor]:
    read = read_folder(path, "cpu", True) or torch.load(path, weights_only=True)
    found: dict[str, Tensor] = read["state_dict"]
    return found


# ------------------------------------------------------------------------------------------- in the background


def _saved_in_both_ways(layout: Layout) -> None:
    for is_async in (False, True):
        one = replace(layout, checkpoint={"async_save": is_async})
        _fit(one, _every_step(dirpath=f"async-{is_async}", save_top_k=-1))
    assert _names("async-True") == _names("async-False")
    assert len(_names("async-True")) == NUM_STEPS
    for name in _names("async-True"):
        verify_checkpoint(Path("async-True", name))
        first, second = _weights(Path("async-False", name)), _weights(Path("async-True", name))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[fqn], second[fqn]) for fqn in first), "training did not change it"
    ends = [_weights_after(replace(layout, checkpoint={}), Path(f"async-{is_async}")) for is_async in (False, True)]
    assert all(torch.equal(ends[0][fqn], ends[1][fqn]) for fqn in ends[0]), "with the states of the optimizer"


def _weights_after(layout: Layout, folder: Path) -> dict[str, Tensor]:
    """The weights of a run that was resumed after its second step."""
    trainer = _fit(layout, ckpt_path=next(folder.glob("step=2*")))
    with trainer.strategy.summon_full_params():
        return {fqn: value.clone() for fqn, value in trainer.lightning_module.state_dict().items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_background_saves_the_same(workers: WorkerPools, layout: Layout) -> None:
    workers(2).run(_saved_in_both_ways, layout)


class _Held:
    """Holds writes in the background until it is let go."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.began = 0
        self.ended = 0

    @contextmanager
    def holding(self) -> Iterator[None]:
        def slow(*args: Any) -> None:
            self.began += 1
            self.let_go.wait(60)
            write_folder(*args)
            self.ended += 1

        with patch.object(trainer_io, "write_folder", slow):
            yield


class _LetGo(Callback):
    """Lets writes go after some steps."""

    def __init__(self, held: _Held, step: int) -> None:
        self.held, self.step = held, step
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.seen.append((trainer.global_step, self.held.ended))
        if trainer.global_step == self.step:
            self.held.let_go.set()


def _goes_on(layout: Layout) -> None:
    held = _Held()
    callback = _LetGo(held, 3)
    once = ModelCheckpoint(dirpath="saved", filename="{step}", every_n_train_steps=2)
    with held.holding():
        _fit(layout, callback, once)
    assert (3, 0) in callback.seen, "it trained on while the checkpoint of step 2 was not written"
    assert held.ended == held.began == 2, "the end of the fit waits for the last"
    (name,) = _names()
    assert name.startswith("step=4"), "top 1"
    verify_checkpoint(Path("saved", name))


def test_training_goes_on(workers: WorkerPools) -> None:
    workers(2).run(_goes_on, IN_BACKGROUND)


# ------------------------------------------------------------------------------------------- failures


@pytest.fixture
def fresh_ranks(workers: WorkerPools) -> None:
    """Ranks whose store, a file that grows with every run, is small: full disks refuse that, too."""
    workers(2).close()


class _FullDisk(Callback):
    """The file system takes no more than some bytes for a file, from a step to another, on one rank."""

    def __init__(self, rank: int, first: int, last: int) -> None:
        self.rank, self.first, self.last = rank, first, last

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        if dist.get_rank() == self.rank:
            is_full = self.first <= trainer.global_step + 1 <= self.last
            _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT if is_full else most, most))

    def on_exception(self, *args: Any) -> None:
        self.teardown()

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))


def _on_a_full_disk(layout: Layout, rank: int) -> str:
    with pytest.raises(CheckpointError, match="Could not write the checkpoint") as raised:
        _fit(layout, _FullDisk(rank, 2, 2), _every_step())
    (name,) = _names()
    assert name.startswith("step=1"), "the one before is kept, and nothing of the other is left"
    verify_checkpoint(Path("saved", name))
    return str(raised.value)


FULL = [
    (Layout(pp=2, save_distributed_checkpoint=True), 0),
    (Layout(dp=2, zero=3), 0),
    (IN_BACKGROUND, 1),
]


@pytest.mark.usefixtures("fresh_ranks")
@pytest.mark.parametrize(("layout", "rank"), FULL)
def test_a_full_disk(workers: WorkerPools, layout: Layout, rank: int) -> None:
    first, second = workers(2).run(_on_a_full_disk, layout, rank)
    assert first == second
    assert f"(rank {rank})" in first
    assert "File too large" in first


# ------------------------------------------------------------------------------------------- other file systems


class _Uploading(CSVLogger):
    """Looks as if it uploaded checkpoint files, as ``WandbLogger(log_model=True)`` does."""

    _log_model = True


def _saved_as(max_file_size: float) -> tuple[bool, int, list[str]]:
    """Whether a folder was saved, the bytes of the file if not, and what was warned of on this rank."""
    layout = Layout(pp=2, dp=1, checkpoint={"max_file_size": max_file_size})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = _fit(layout, enable_checkpointing=False, logger=_Uploading("logs"))
    trainer.save_checkpoint(path := Path(f"{max_file_size}.ckpt"))
    warned = [str(warning.message) for warning in told if "log_model" in str(warning.message)]
    return path.is_dir(), path.stat().st_size, warned


def _saved_by_size() -> list[tuple[bool, int, list[str]]]:
    first = _saved_as(16)
    size = first[1] / GIB
    return [first, _saved_as(1.1 * size), _saved_as(0.9 * size)]


def test_only_what_is_too_large_for_a_file_becomes_a_folder(
    workers: WorkerPools, caplog: pytest.LogCaptureFixture
) -> None:
    for rank, chosen in enumerate(workers(2).run(_saved_by_size)):
        assert [is_folder for is_folder, _, _ in chosen] == [False, False, True]
        assert [len(warned) for _, _, warned in chosen] == [0, 0, rank == 0]
    with caplog.at_level(logging.INFO):
        assert not is_too_large(GIB, 1)
        assert not caplog.text
        assert is_too_large(84 * GIB, 16)
    assert "one file would have about 84.00 GiB and checkpoint.max_file_size is 16 GiB" in caplog.text


def _to_memory(layout: Layout, dirpath: str) -> str:
    trainer = _trainer(layout, ModelCheckpoint(dirpath=dirpath, filename="last"))
    try:
        trainer.fit(TinyMLP(), _data(layout))
    except ConfigError as error:
        return str(error)
    finally:
        assert not [path for path in Path().iterdir() if ":" in path.name]
    return "saved"


def test_files_alone_go_to_remote_file_systems(workers: WorkerPools) -> None:
    first, second = workers(2).run(_to_memory, Layout(pp=2, save_distributed_checkpoint=True), "memory://saved")
    assert first == second
    assert "ModelCheckpoint saves to memory://saved, which is on a remote file system" in first
    assert "save_distributed_checkpoint=False" in first
    assert workers(2).run(_to_memory, Layout(pp=2), "memory://saved") == ["saved", "saved"]


# ------------------------------------------------------------------------------------------- disks of one rank alone


def _elsewhere(is_left_over: bool) -> tuple[str, str]:
    """Save over a checkpoint of one step where each rank has a disk of its own, and load that one there."""
    layout = Layout(dp=2, zero=3, save_distributed_checkpoint=True)
    trainer = _fit(layout, enable_checkpointing=False)
    trainer.save_checkpoint("before.ckpt")
    dist.barrier()
    disk = Path(f"disk{dist.get_rank()}").absolute()
    disk.mkdir()
    if dist.get_rank() == 0:
        Path("before.ckpt").rename(disk / "same.ckpt")
    elif is_left_over:  # of a save that was killed
        (disk / ".same.ckpt.saving").mkdir()
    with contextlib.chdir(disk):
        with pytest.raises(CheckpointError) as unsaved:
            trainer.save_checkpoint("same.ckpt")
        with pytest.raises(CheckpointError) as unread:
            _fit(layout, enable_checkpointing=False, ckpt_path=Path("same.ckpt"))
        if dist.get_rank() == 0:
            verify_checkpoint("same.ckpt")
            assert [path.name for path in Path().iterdir()] == ["same.ckpt"], "nothing else is left"
    return str(unsaved.value), str(unread.value)


@pytest.mark.parametrize(
    ("is_left_over", "says"), [(False, "does not see .same.ckpt.saving"), (True, "files are not in")]
)
def test_a_folder_that_ranks_do_not_share(workers: WorkerPools, is_left_over: bool, says: str) -> None:
    first, second = workers(2).run(_elsewhere, is_left_over)
    assert first == second
    assert says in first[0]
    assert "Rank 0 sees a folder there, and this rank nothing" in first[1]
    assert all("all of them must share" in said and said.count("\n") == 0 for said in first)


def _with_a_rank_that_can_not_send() -> str:
    trainer = _fit(Layout(dp=2, zero=3), enable_checkpointing=False)
    fails = patch.object(gathering, "_bytes", side_effect=torch.OutOfMemoryError("no room for the copy"))
    with fails if dist.get_rank() == 1 else contextlib.nullcontext(), pytest.raises(CheckpointError) as raised:
        trainer.save_checkpoint("one.ckpt")
    trainer.save_checkpoint("other.ckpt")
    verify_checkpoint("other.ckpt")
    assert not Path("one.ckpt").exists()
    return str(raised.value)


def test_a_rank_that_can_not_send_its_part(workers: WorkerPools) -> None:
    first, second = workers(2).run(_with_a_rank_that_can_not_send)
    assert first == second
    assert "Could not write" in first
    assert "rank 1 ran into OutOfMemoryError: no room for the copy" in first


class _LastSaves(Callback):
    """Saves as the Trainer does before it has SLURM run the job again, and in handlers of signals."""

    def on_fit_start(self, trainer: L.Trainer, *args: Any) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step != 2:
            return
        self.save("hpc_ckpt_1.ckpt")
        handlers = [self.on_signal, partial(self.on_signal), self, lambda *_: self.save("signal.ckpt")]
        for handler in handlers:
            before = signal.signal(signal.SIGUSR2, handler)
            signal.raise_signal(signal.SIGUSR2)
            signal.signal(signal.SIGUSR2, before)

    def on_signal(self, *args: Any) -> None:
        self.save("signal.ckpt")

    __call__ = on_signal

    def save(self, path: str) -> None:
        self.trainer.save_checkpoint(path)
        assert not [thread for thread in threading.enumerate() if thread.name == "checkpoint"]
        verify_checkpoint(path)


class _Settings(Callback):
    """Looks at what the user's own torch.save would find while a checkpoint is written in the background."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        write = FileSystemWriter.write_data

        def looking(*args: Any) -> Any:
            self.seen.append(get_crc32_options())
            return write(*args)

        with patch.object(FileSystemWriter, "write_data", looking):
            yield


def _in_background() -> None:
    settings = _Settings()
    with settings.looked_at():
        _fit(IN_BACKGROUND, _LastSaves(), _every_step())
    assert settings.seen == [True] * (NUM_STEPS + 5)


def test_a_save_on_a_signal_is_whole_and_settings_stay(workers: WorkerPools) -> None:
    workers(2).run(_in_background)
