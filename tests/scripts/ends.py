"""Fits that end by failures and signals: `python tests/scripts/ends.py DIRECTORY CASE...`, a case as JSON.

Ranks are forked, so that what they import is imported once. In `DIRECTORY/<number of the case>` each rank leaves its
output; `ends.json` there tells its exit status and its seconds after the start, or None where it had to be killed.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader

LAYOUTS: Mapping[str, dict[str, Any]] = {
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2": {},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2 microbatched": {"pipeline_parallel_size": 2, "pipeline": {"mode": "microbatched"}},
    "pp 2 inline": {"pipeline_parallel_size": 2, "pipeline": {"mode": "inline"}},
    "pp 2 x dp 2 inline": {"pipeline_parallel_size": 2, "data_parallel_size": 2, "pipeline": {"mode": "inline"}},
}

DEEDS: Mapping[str, Callable[[], object]] = {
    "raises": lambda: _raise(ArithmeticError("the model's own error")),
    "exits": lambda: os._exit(3),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "is killed in a block": lambda: _block_deeds.append("is killed"),
    "takes another path": lambda: _block_deeds.append("turns"),
    "makes NaN": lambda: _block_deeds.append("spoils"),  # of what the other ranks get in its backward
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "has fewer batches": lambda: None,  # all the time
    "gets SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "gets SIGINT": lambda: os.kill(os.getpid(), signal.SIGINT),
    "gets SIGUSR1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "waits for one that loops": lambda: _wait_for_ever(),
}

SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}

_block_deeds: list[str] = []
"""What the next step of this rank does."""


def world_size(layout: str) -> int:
    """Of one of `LAYOUTS`."""
    return 2 * LAYOUTS[layout].get("data_parallel_size", 1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fit."""

    layout: str
    deed: str | None = None
    """Of `DEEDS`, in the batch `at`."""
    ranks: list[int]
    """That do it, or get the signal."""
    at: int = 3
    callback: str | None = None
    num_steps: int = 12
    pause: float = 0.0
    """Seconds before each batch."""
    heartbeat_timeout: float = 120.0
    limit: float = 100.0
    """Seconds after which ranks that still run are killed."""
    signal: str | None = None
    """Of `SIGNALS`, sent from outside."""
    delay: float = 0.0
    """Seconds from when all ranks set up the model to the signal."""
    stopped: float = 0.0
    """Seconds after which SIGCONT follows the signal."""


def _raise(error: Exception) -> None:
    raise error


def _wait_for_ever() -> None:
    """On rank 0 in a collective, in which Ctrl+C comes twice, and which other ranks never come to."""
    if dist.get_rank() == 0:
        for seconds in (1.0, 4.0):
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()
        dist.barrier()
    while True:
        pass


class Acting(nn.Linear):
    """A block that does what is asked for."""

    def forward(self, x: Tensor) -> Tensor:
        if "is killed" in _block_deeds:
            DEEDS["is killed"]()
        y = super().forward(x)
        return y + (0 * y).sqrt() if "spoils" in _block_deeds else y


class Model(TinyMLP):
    """Both stages have a block that acts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0], self.layers[-1] = Acting(8, 32), Acting(32, 4)  # type: ignore[index,operator]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.relu() if "turns" in _block_deeds else y


class Acts(Callback):
    def __init__(self, case: Case, directory: Path) -> None:
        self._case, self._directory = case, directory

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        (self._directory / f"ready{trainer.global_rank}").touch()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        time.sleep(self._case.pause)
        is_time = trainer.global_step == self._case.at and trainer.global_rank in self._case.ranks
        if is_time and self._case.deed is not None:
            DEEDS[self._case.deed]()


class Uneven(IterableDataset[Any]):
    """Six batches of eight, and four where the rank has fewer."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __iter__(self) -> Iterator[Any]:
        num_batches = 4 if int(os.environ["RANK"]) in self._case.ranks else 6
        samples = features(8 * num_batches)
        return (samples[i] for i in range(8 * num_batches))


def _fit(case: Case, directory: Path) -> None:
    torch.set_num_threads(1)
    saving: dict[str, Callback] = {
        "on exception": OnExceptionCheckpoint(directory),
        "save_on_exception": ModelCheckpoint(directory, save_on_exception=True, every_n_train_steps=1000),
    }
    timeout = timedelta(seconds=case.heartbeat_timeout)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=world_size(case.layout),
        strategy=ThreeDStrategy(**LAYOUTS[case.layout], heartbeat_timeout=timeout),
        max_steps=case.num_steps,
        max_epochs=1 if case.deed == "has fewer batches" else -1,
        logger=False,
        default_root_dir=directory,
        enable_checkpointing=case.callback is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Acts(case, directory), *([saving[case.callback]] if case.callback else [])],
        plugins=[SLURMEnvironment(auto_requeue=True)] if case.deed == "gets SIGUSR1" else None,
        detect_anomaly=case.deed == "makes NaN",
    )
    has_fewer = case.deed == "has fewer batches"
    data = DataLoader(Uneven(case), batch_size=8) if has_fewer else loader(features(64), global_batch_size=8)
    trainer.fit(Model(), data)
    print(f"fitted {trainer.global_step} steps", flush=True)


def _environment(case: Case, rank: int, port: int) -> dict[str, str]:
    size = world_size(case.layout)
    ranks = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_RANK": 0,
    }
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    if case.deed != "gets SIGUSR1":
        return {name: str(value) for name, value in {**ranks, **common, "TORCHELASTIC_RUN_ID": "test"}.items()}
    slurm = {"SLURM_NTASKS": size, "SLURM_NTASKS_PER_NODE": size, "SLURM_PROCID": rank}
    slurm |= {"SLURM_LOCALID": rank, "SLURM_NODEID": 0, "SLURM_NNODES": 1, "SLURM_JOB_ID": 1}
    return {name: str(value) for name, value in {**slurm, **common, "SLURM_JOB_NAME": "test"}.items()}


def _rank(case: Case, rank: int, port: int, directory: Path) -> None:
    """A rank's whole life; returns where a program would end, so that the interpreter shuts down as always."""
    output = os.open(directory / f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(_environment(case, rank, port))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has its background jobs ignore it
    _fit(case, directory)


def _start(case: Case, directory: Path) -> dict[int, int] | None:
    """Rank by process; None in a rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: dict[int, int] = {}
    for rank in range(world_size(case.layout)):
        if (pid := os.fork()) == 0:
            _rank(case, rank, port, directory)
            return None
        started[pid] = rank
    return started


def _send(case: Case, running: Mapping[int, int], directory: Path) -> None:
    assert case.signal is not None
    while not all((directory / f"ready{rank}").exists() for rank in range(world_size(case.layout))):
        time.sleep(0.01)
    time.sleep(case.delay)
    targets = [pid for pid, rank in running.items() if rank in case.ranks]
    for pid in targets:
        os.kill(pid, SIGNALS[case.signal])
    if case.signal == "SIGSTOP":
        time.sleep(case.stopped)
        for pid in targets:
            os.kill(pid, signal.SIGCONT)


def _await(case: Case, running: dict[int, int], begin: float) -> dict[int, tuple[int, float] | None]:
    ends: dict[int, tuple[int, float] | None] = {}
    while running and time.monotonic() < begin + case.limit:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[running.pop(pid)] = (os.waitstatus_to_exitcode(status), time.monotonic() - begin)
        if case.deed == "is stopped" and set(running.values()) <= set(case.ranks):
            break  # they never end
        time.sleep(0.01)
    for pid, rank in running.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ends[rank] = None
    return ends


def main(directory: Path, cases: list[Case]) -> None:
    """Run one after the other."""
    gc.freeze()  # what was imported takes no part in searches for garbage: each end of a rank would take 5 s for it
    for number, case in enumerate(cases):
        inner = directory / str(number)
        inner.mkdir()
        begin = time.monotonic()
        running = _start(case, inner)
        if running is None:
            return
        if case.signal is not None:
            _send(case, running, inner)
        (inner / "ends.json").write_text(json.dumps(_await(case, running, begin)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Case(**json.loads(text)) for text in sys.argv[2:]])
