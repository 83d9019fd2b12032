"""Long waits before the first step are told of, on rank 0 alone and where the Trainer shows progress."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar

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
def _impatient(patience: float = 0.02) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "_PATIENCE", patience)
        patch.setattr(waits, "_BETWEEN_LINES", 0.002)
        yield


def test_the_innermost_wait_is_told() -> None:
    trainer, screen = L.Trainer(devices=1, callbacks=[Bar()], **SETTINGS), io.StringIO()
    wait = Waits(trainer, lambda: False)
    with _impatient(), redirect_stdout(screen), wait("outer"), wait("inner"):
        time.sleep(0.2)
    assert set(screen.getvalue().splitlines()) == {"inner (0 s)"}


def _told(sizes: dict[str, int]) -> set[str]:
    """What a fit waits for, as it is shown on this rank."""
    strategy = ThreeDStrategy(**sizes)  # type: ignore[arg-type]  # sizes alone
    trainer = L.Trainer(
        **SETTINGS, devices=torch.distributed.get_world_size(), strategy=strategy, max_steps=1, callbacks=[Bar()]
    )
    screen = io.StringIO()
    with _impatient(patience=0.0), redirect_stdout(screen):
        trainer.fit(TinyGPT(), loader(tokens(8), global_batch_size=8))
    return {line.rpartition(" (")[0] for line in screen.getvalue().splitlines() if line.endswith(" s)")}


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
    assert {"Tracing training_step", expected} <= on_first
    assert on_second == set()
