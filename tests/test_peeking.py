"""Batches of one replica are those of one process, in order, though planning looks at the first."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler

from tests.models import TinyGPT, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

Batch = tuple[Tensor, Tensor]

DATA = tokens(40)


def _batch(indices: Any) -> Batch:
    samples = [DATA[int(i)] for i in indices]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Streams(IterableDataset[Any]):
    """Goes on where the last epoch ended: samples come from an iterator, a file, and generators of random numbers."""

    def __init__(self) -> None:
        self.samples = (DATA[i % 40] for i in range(1000))
        self.file = io.StringIO("\n".join(str(i % 40) for i in range(1000)))
        self.numbers = {"python": random.Random(3), "numpy": np.random.default_rng(4)}
        self.order = iter(list(range(40)) * 20)
        self.num_given = 0
        self.drawn: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        for _ in range(40):
            self.num_given += 1
            x, y = next(self.samples)
            line = int(self.file.readline())
            self.drawn.append(self.numbers["python"].randrange(64))
            offset = self.drawn[-1] + int(self.numbers["numpy"].integers(64)) + next(self.order) + line + self.num_given
            yield (x + offset) % 64, y


class Counting(RandomSampler):
    """Every epoch in another order, by how often it was asked."""

    def __init__(self) -> None:
        super().__init__(DATA)  # type: ignore[arg-type]
        self.num_epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.num_epochs += 1
        yield from ((i * 7 + self.num_epochs) % 40 for i in range(40))


LOADERS: dict[str, Callable[[], Any]] = {
    "streams": lambda: DataLoader(Streams(), batch_size=8),
    "generator": lambda: (_batch(range(8 * i % 40, 8 * i % 40 + 8)) for i in range(10)),
    "shuffled": lambda: DataLoader(DATA, batch_size=8, shuffle=True),
    "sampler of the user": lambda: DataLoader(DATA, batch_size=8, sampler=WeightedRandomSampler([*range(40)], 40)),
    "sampler that counts": lambda: DataLoader(DATA, batch_size=8, sampler=Counting()),
}


class Configured(TinyGPT):
    """Made when the Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.more: nn.Module | None = None

    def configure_model(self) -> None:
        self.more = self.more or nn.Linear(64, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        assert self.more is not None
        logits: Tensor = self.more(super().forward(tokens))
        return logits


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
    model = Configured() if name == "shuffled" else TinyGPT(num_layers=2)
    trainer.fit(model, LOADERS[name](), DataLoader(DATA, batch_size=8))
    return sees.batches, sees.losses


@pytest.mark.parametrize("name", LOADERS)
def test_planning_takes_nothing_away(workers: WorkerPools, name: str) -> None:
    batches, losses = workers(1).run(_fit, None, name)[0]
    assert len(batches) >= 5
    for found, of_rank in workers(2).run(_fit, Layout(pp=2), name):
        assert found == batches
        assert of_rank == pytest.approx(losses, abs=2e-4)
