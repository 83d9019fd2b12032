"""Long waits are told of, on rank 0 alone."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_3d import ThreeDStrategy, waits
from lightning_3d.cli import main
from tests.models import TinyGPT, loader, tokens
from tests.parity import QUIET
from tests.workers import WorkerPools

SETTINGS: dict[str, Any] = {**QUIET, "enable_checkpointing": False}


class AtOnce:
    """A timer without patience."""

    daemon = True

    def __init__(self, seconds: float, tell: Any, args: list[str]) -> None:
        self.start = lambda: tell(*args)

    def cancel(self) -> None: ...


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def _told(timer: Any = AtOnce) -> Iterator[list[str]]:
    """What the log of this rank says meanwhile."""
    handler, log = _Lines(), logging.getLogger("lightning.pytorch")
    log.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "Timer", timer)
        yield handler.lines
    log.removeHandler(handler)


def test_a_wait_is_told_of_when_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_PATIENCE", 0.1)
    with _told(waits.Timer) as lines:
        with waits.telling("Something short"):
            pass
        with waits.telling("Something long"):
            time.sleep(0.3)
    assert lines == ["Something long ..."]


def _told_of_a_fit(sizes: dict[str, int]) -> list[str]:
    strategy = ThreeDStrategy(**sizes)  # type: ignore[arg-type]  # sizes alone
    trainer = L.Trainer(**SETTINGS, devices=torch.distributed.get_world_size(), strategy=strategy, max_steps=1)
    with _told() as lines:
        trainer.fit(TinyGPT(), loader(tokens(8), global_batch_size=8))
    return lines


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"pipeline_parallel_size": 2}, "Finding out how the loss of training_step comes from microbatches ..."),
        ({"tensor_parallel_size": 2}, "Proving blocks.0, block 3 of 8 ..."),
    ],
    ids=["pp", "tp"],
)
def test_waits_before_the_first_step(workers: WorkerPools, sizes: dict[str, int], expected: str) -> None:
    on_first, on_second = workers(2).run(_told_of_a_fit, sizes)
    assert {"Tracing training_step ...", expected} <= {*on_first}
    assert not any(line.endswith(" ...") for line in on_second)


class Saves(L.Callback):
    """Saves to a path after each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _told_of_checkpoints(saved: Path) -> list[str]:
    data = loader(tokens(16), global_batch_size=8)
    with _told() as lines:
        for steps, path, callbacks in ((1, None, [Saves(saved)]), (2, saved, [])):
            strategy = ThreeDStrategy(save_distributed_checkpoint=True)
            trainer = L.Trainer(**SETTINGS, devices=1, strategy=strategy, max_steps=steps, callbacks=callbacks)
            trainer.fit(TinyGPT(), data, data, ckpt_path=path)
    return lines


def test_checkpoints(workers: WorkerPools, tmp_path: Path) -> None:
    (lines,) = workers(1).run(_told_of_checkpoints, tmp_path / "saved")
    whats = ("Saving a checkpoint", "Checking and reading the checkpoint", "Loading the optimizers from the checkpoint")
    assert {f"{what} ..." for what in whats} <= {*lines}


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with _told() as lines:
        main(["plan", "tests.models.TinyGPT", "tests.test_plan_ahead.a_batch", "--world_size", "2"])
    assert {"Making the model and the data ...", "Planning ..."} <= {*lines}
