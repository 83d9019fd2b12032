"""Seconds from the death of a worker to the first step after it, by part, against plain DDP.

    python -m benchmarks.restart [STRATEGY ...]

Two processes under torchrun train a GPT of width 256 with 8 layers, and save each step; one of them is killed. The
parts are those of the slowest rank: until the other process has ended, until torchrun has started both again, imports,
the model and its plan until the fit begins, and the first step. The bar: at most 1.5 of the whole of DDP.
"""

# ruff: noqa: E402  # the imports are measured
from __future__ import annotations

import time

_START = time.time()  # before the imports

import os
import signal
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from rich.console import Console
from rich.table import Table

from benchmarks.models import GPT, random_tokens
from lightning_3d import ThreeDStrategy
from tests.scripts import start

VOCABULARY, BATCH, LENGTH, STEPS, LAST = 8192, 4, 128, 6, 3
"""LAST: the step after which a worker is killed."""
STRATEGIES: dict[str, Any] = {
    "ddp": "ddp",
    "data 2": {"zero": {"stage": 1}},
    "ZeRO-3": {"zero": {"stage": 3}},
    "tensor 2": {"tensor_parallel_size": 2},
    "pipeline 2": {"pipeline_parallel_size": 2, "pipeline": {"num_microbatches": 2}},
}
PARTS = ("noticed", "started", "imports", "plan", "first step")


class _Clock(L.Callback):
    """Notes when a process gets where, and kills that of rank 1 once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._died = folder, folder / "died"
        self._is_again = self._died.exists()
        self._note("started", _START)
        self._note("imports")

    def _note(self, part: str, seconds: float | None = None) -> None:
        name = f"{part}.{os.environ['RANK']}"
        if self._is_again and not (self._folder / name).exists():
            (self._folder / name).write_text(repr(time.time() if seconds is None else seconds))

    def on_train_start(self, *args: Any) -> None:
        self._note("plan")

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._note("first step")
        if not self._is_again and trainer.global_step == LAST + 1 and trainer.global_rank == 1:
            self._died.write_text(repr(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


def worker(folder: Path, name: str) -> None:
    """Train; what a process of torchrun does."""
    settings = STRATEGIES[name]
    strategy = ThreeDStrategy(**settings) if isinstance(settings, dict) else settings
    saves = ModelCheckpoint(folder, every_n_train_steps=1, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[_Clock(folder), saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ended = folder / f"noticed.{os.environ['RANK']}"
    try:
        trainer.fit(GPT(VOCABULARY), random_tokens(STEPS, BATCH, LENGTH, VOCABULARY), ckpt_path="last")
    finally:
        if not ended.exists():
            ended.write_text(repr(time.time()))


def measure(name: str) -> list[float]:
    """Seconds of each part. DDP on gloo does not go on under torchrun, which is started anew for it by hand."""
    with tempfile.TemporaryDirectory() as path:
        folder, is_ddp = Path(path), name == "ddp"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", f"--max-restarts={1 - is_ddp}"]
        ended = start([*launch, "-m", "benchmarks.restart", "--worker", path, name], timeout=240)
        at = [float((folder / "died").read_text())]
        if is_ddp:
            at = [time.time()]
            ended = start([*launch, "-m", "benchmarks.restart", "--worker", path, name], timeout=240)
        assert ended.returncode == 0, ended.output
        for part in PARTS:
            found = [float(file.read_text()) for file in folder.glob(f"{part}.*")]
            at.append(max([at[-1], *found]) if part != "noticed" else _noticed(folder, at[0]))
    return [after - before for before, after in pairwise(at)]


def _noticed(folder: Path, died: float) -> float:
    """When the fit of rank 0 ended, which waits for the one that died."""
    file, started = folder / "noticed.0", folder / "started.0"
    return min(max(died, float(file.read_text())), float(started.read_text())) if file.exists() else died


def main(*names: str) -> None:
    """Print the table."""
    table = Table("", *PARTS, "all", "of DDP", title="seconds after a worker is killed")
    base = 0.0
    for name in ("ddp", *(names or [name for name in STRATEGIES if name != "ddp"])):
        seconds = measure(name)
        base = base or sum(seconds)
        table.add_row(name, *(f"{s:.1f}" for s in (*seconds, sum(seconds))), f"{sum(seconds) / base:.2f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), sys.argv[3])
    else:
        main(*sys.argv[1:])
