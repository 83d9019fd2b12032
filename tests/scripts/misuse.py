"""Trains with one mistake: `python tests/scripts/misuse.py NAME DIRECTORY`.

Every rank that gets as far as an error leaves it in `DIRECTORY/rank<local rank>`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET

STEPS = 4

Batch = tuple[Tensor, Tensor]


class OneBlock(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(8, 4)  # type: ignore[assignment]  # one block, where TinyMLP has several


class Misspelt(TinyMLP):
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)  # noqa: F841  # as it is returned by another name
        return losss  # type: ignore[name-defined]  # noqa: F821  # the mistake under test


def _fit(model: L.LightningModule, **settings: Any) -> None:
    strategy = ThreeDStrategy(**settings)
    trainer = L.Trainer(**QUIET, devices=2, strategy=strategy, max_steps=STEPS, enable_checkpointing=False)
    trainer.fit(model, loader(features(STEPS * 8), global_batch_size=8))


MISTAKES: Mapping[str, Callable[[], None]] = {
    "key": lambda: _fit(TinyMLP(), zero={"stge": 2}),
    "stages": lambda: _fit(OneBlock(), pipeline_parallel_size=2),
    "misspelt": lambda: _fit(Misspelt(), pipeline_parallel_size=2),
}


if __name__ == "__main__":
    name, directory = sys.argv[1:]
    try:
        MISTAKES[name]()
    except BaseException as error:
        Path(directory, f"rank{os.environ.get('LOCAL_RANK', '0')}").write_text(f"{type(error).__name__}: {error}")
        raise
