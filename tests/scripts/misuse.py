"""Trains with one mistake: `python tests/scripts/misuse.py NAME DIRECTORY`.

Every rank that gets as far as an error leaves it in `DIRECTORY/rank<local rank>`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader

STEPS = 4
BAD_STEP = 2

Batch = tuple[Tensor, Tensor]


class OneBlock(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(8, 4)  # type: ignore[assignment]  # one block, where TinyMLP has several


class ReturnsNothing(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]  # the mistake under test
        super().training_step(batch, batch_idx)


class Misspelt(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # noqa: F841  # as it is returned by another name
        return losss  # type: ignore[name-defined]  # noqa: F821  # the mistake under test


class FailsOnLastStage(TinyMLP):
    num_begun = 0

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.num_begun += 1

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # earlier stages leave before this ends
        if self.num_begun > BAD_STEP:
            raise ArithmeticError("the model's own error")
        return loss


class Dies(TinyMLP):
    """One of its ranks is killed, as by the system when memory runs out."""

    def __init__(self, bad_rank: int) -> None:
        super().__init__()
        self.bad_rank = bad_rank

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if self.global_step == BAD_STEP and self.global_rank == self.bad_rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def _fit(model: L.LightningModule, devices: int, batch_size: int = 8, **settings: Any) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=ThreeDStrategy(**settings),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader(features(STEPS * batch_size), global_batch_size=batch_size))


MISTAKES: Mapping[str, Callable[[], None]] = {
    "world size": lambda: _fit(TinyMLP(), 3, pipeline_parallel_size=2),
    "stages": lambda: _fit(OneBlock(), 2, pipeline_parallel_size=2),
    "microbatches": lambda: _fit(
        TinyMLP(), 2, batch_size=2, pipeline_parallel_size=2, pipeline={"num_microbatches": 4}
    ),
    "key": lambda: _fit(TinyMLP(), 2, zero={"stge": 2}),
    "value": lambda: _fit(TinyMLP(), 2, pipeline_parallel_size=2, pipeline={"schedule": "1f1bb"}),
    "size": lambda: _fit(TinyMLP(), 2, pipeline_parallel_size=0),
    "no loss": lambda: _fit(ReturnsNothing(), 2, pipeline_parallel_size=2),
    "misspelt": lambda: _fit(Misspelt(), 2, pipeline_parallel_size=2),
    "user's error": lambda: _fit(FailsOnLastStage(), 2, pipeline_parallel_size=2),
    "first stage dies": lambda: _fit(Dies(0), 2, pipeline_parallel_size=2),
    "last replica dies": lambda: _fit(Dies(1), 2, zero={"stage": 3}),
}


if __name__ == "__main__":
    name, directory = sys.argv[1:]
    try:
        MISTAKES[name]()
    except BaseException as error:
        Path(directory, f"rank{os.environ.get('LOCAL_RANK', '0')}").write_text(f"{type(error).__name__}: {error}")
        raise
