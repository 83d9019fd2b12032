"""Long waits are told of, on rank 0 alone and where the Trainer shows progress."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

from lightning_3d import ThreeDStrategy, waits
from lightning_3d.cli import main
from tests.models import TinyGPT, loader, tokens
from tests.parity import QUIET
from tests.workers import WorkerPools

SETTINGS: dict[str, Any] = {k: v for k, v in {**QUIET, "enable_checkpointing": False}.items() if "progress" not in k}


class Bar(RichProgressBar):
    """Prints plainly above it."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        print(*args)


@contextmanager
def _shown() -> Iterator[io.StringIO]:
    """What waits show on standard error, without patience."""
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(screen):
        patch.setattr(waits, "_PATIENCE", 0.0)
        patch.setattr(waits, "_BETWEEN_FRAMES", 0.002)
        patch.setattr(waits, "Console", lambda **_: Console(file=screen, force_terminal=True, width=80))
        yield screen


def _told(sizes: dict[str, int]) -> str:
    """What a fit waits for, as it is shown on this rank."""
    strategy = ThreeDStrategy(**sizes)  # type: ignore[arg-type]  # sizes alone
    trainer = L.Trainer(
        **SETTINGS, devices=torch.distributed.get_world_size(), strategy=strategy, max_steps=1, callbacks=[Bar()]
    )
    with _shown() as screen, redirect_stdout(screen):
        trainer.fit(TinyGPT(), loader(tokens(8), global_batch_size=8))
    return screen.getvalue()


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"pipeline_parallel_size": 2}, "Finding out how the loss of training_step comes from microbatches"),
        ({"tensor_parallel_size": 2}, "Proving blocks.0, block 3 of 8"),
    ],
    ids=["pp", "tp"],
)
def test_waits_before_the_first_step(workers: WorkerPools, sizes: dict[str, int], expected: str) -> None:
    on_first, on_second = workers(2).run(_told, sizes)
    assert "Tracing training_step (" in on_first
    assert f"{expected} (" in on_first
    assert " s)" not in on_second


class Saves(L.Callback):
    """Saves to a path after each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.path)


def _told_of_checkpoints(saved: Path) -> str:
    data = loader(tokens(16), global_batch_size=8)
    with _shown() as screen, redirect_stdout(screen):
        for steps, path, callbacks in ((1, None, [Bar(), Saves(saved)]), (2, saved, [Bar()])):
            strategy = ThreeDStrategy(save_distributed_checkpoint=True)
            trainer = L.Trainer(**SETTINGS, devices=1, strategy=strategy, max_steps=steps, callbacks=callbacks)
            trainer.fit(TinyGPT(), data, data, ckpt_path=path)
    return screen.getvalue()


def test_checkpoints(workers: WorkerPools, tmp_path: Path) -> None:
    (screen,) = workers(1).run(_told_of_checkpoints, tmp_path / "saved")
    assert "Saving a checkpoint (0 s)\n" in screen  # above the bar
    assert "Checking and reading the checkpoint" in screen
    assert "Loading the optimizers from the checkpoint (" in screen


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with _shown() as screen:
        main(["plan", "tests.models.TinyGPT", "tests.test_plan_ahead.a_batch", "--world_size", "2"])
    assert "Making the model and the data (" in screen.getvalue()
    assert "Planning (" in screen.getvalue()
