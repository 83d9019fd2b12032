"""Long waits before the first step are told of, on rank 0 alone and where the Trainer shows progress."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar
from rich.console import Console

from lightning_3d import ThreeDStrategy, waits
from lightning_3d.waits import Waits
from tests.models import TinyGPT, loader, tokens
from tests.parity import QUIET
from tests.workers import WorkerPools

SETTINGS: dict[str, Any] = {k: v for k, v in {**QUIET, "enable_checkpointing": False}.items() if "progress" not in k}


class Bar(RichProgressBar):
    """Prints plainly above it."""

    def print(self, *args: Any, **kwargs: Any) -> None:
        print(*args)


@contextmanager
def _shown(*, terminal: bool) -> Iterator[io.StringIO]:
    """What waits show on standard error, without patience."""
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(screen):
        patch.setattr(waits, "_PATIENCE", 0.0)
        patch.setattr(waits, "_BETWEEN_FRAMES", 0.002)
        patch.setattr(waits, "Console", lambda **_: Console(file=screen, force_terminal=terminal, width=80))
        yield screen


def _nested(trainer: L.Trainer | None, *, terminal: bool, is_stepping: bool = False) -> str:
    wait = Waits(trainer, lambda: is_stepping)
    with _shown(terminal=terminal) as screen, wait("outer"), wait("inner"):
        time.sleep(0.2)
    return screen.getvalue()


def test_a_spinner_that_goes_away_or_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Logs get one line, a Trainer without a progress bar nothing, and one that draws a bar a line above it."""
    spun = _nested(None, terminal=True)
    assert "inner (0 s)" in spun
    assert spun.endswith("\x1b[2K")  # the line is erased
    with_bar = L.Trainer(devices=1, callbacks=[Bar()], **SETTINGS)
    assert _nested(with_bar, terminal=False).count(" (0 s)\n") == 1
    assert _nested(L.Trainer(devices=1, enable_progress_bar=False, **SETTINGS), terminal=True) == ""
    capsys.readouterr()
    assert _nested(with_bar, terminal=True, is_stepping=True) == ""
    assert capsys.readouterr().out.count(" (0 s)\n") == 1


def _told(sizes: dict[str, int]) -> str:
    """What a fit waits for, as it is shown on this rank."""
    strategy = ThreeDStrategy(**sizes)  # type: ignore[arg-type]  # sizes alone
    trainer = L.Trainer(
        **SETTINGS, devices=torch.distributed.get_world_size(), strategy=strategy, max_steps=1, callbacks=[Bar()]
    )
    with _shown(terminal=True) as screen, redirect_stdout(screen):
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
