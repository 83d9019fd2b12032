"""Batches of one replica are those of one process, in order, though planning looks at the first."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from tests.models import TinyGPT, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

Batch = tuple[Tensor, Tensor]

DATA = tokens(40)


def _batch(indices: Any) -> Batch:
    samples = [DATA[int(i)] for i in indices]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Streams(IterableDataset[Any]):
    """Goes on where the last epoch ended, with numbers of a generator of its own."""

    def __init__(self) -> None:
        self.samples, self.numbers = (DATA[i % 40] for i in range(1000)), random.Random(3)

    def __iter__(self) -> Iterator[Any]:
        for _ in range(40):
            x, y = next(self.samples)
            yield (x + self.numbers.randrange(64)) % 64, y


LOADERS: dict[str, Callable[[], Any]] = {
    "streams": lambda: DataLoader(Streams(), batch_size=8),
    "generator": lambda: (_batch(range(8 * i % 40, 8 * i % 40 + 8)) for i in range(10)),
    "shuffled": lambda: DataLoader(DATA, batch_size=8, shuffle=True),
    "sampler of the user": lambda: DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler([*range(40)], 40)),
}


class Sees(L.Callback):
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(int((batch[0] * torch.arange(1, 17)).sum()))
        self.losses.append(round(float(outputs["loss"]), 4))

    def on_validation_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        self.batches.append(int((batch[0] * torch.arange(1, 17)).sum()))


def _fit(layout: Layout | None, name: str) -> tuple[list[int], list[float]]:
    sees = Sees()
    strategy, devices = ("auto", 1) if layout is None else (layout.strategy(), layout.world_size)
    L.seed_everything(1, verbose=False)
    settings = {**QUIET, "max_epochs": 2, "limit_val_batches": 2, "num_sanity_val_steps": 1}
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=[sees], enable_checkpointing=False, **settings)
    trainer.fit(TinyGPT(num_layers=2), LOADERS[name](), DataLoader(DATA, batch_size=8))
    return sees.batches, sees.losses


@pytest.mark.parametrize("name", LOADERS)
def test_planning_takes_nothing_away(workers: WorkerPools, name: str) -> None:
    batches, losses = workers(1).run(_fit, None, name)[0]
    assert len(batches) >= 5
    for found, of_rank in workers(2).run(_fit, Layout(pp=2), name):
        assert found == batches
        assert of_rank == pytest.approx(losses, abs=2e-4)
