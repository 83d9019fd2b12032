"""Dataloaders that keep where they are: planning looks at their first batch, and training sees every batch once."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from tests.models import TinyGPT, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

Batch = tuple[Tensor, Tensor]

DATA = tokens(40)


def _batch(indices: Any) -> Batch:
    samples = [DATA[int(i)] for i in indices]
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


class Stateful:
    """A dataloader that resumes where its state says."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[Batch]:
        first, self.at = self.at, 0
        return self._batches(first)

    def _batches(self, first: int) -> Iterator[Batch]:
        for i in range(first, len(self)):
            self.at = i + 1
            yield _batch(range(8 * i, 8 * i + 8))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


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
    "stateful": Stateful,
    "streams": lambda: DataLoader(Streams(), batch_size=8),
    "generator": lambda: (_batch(range(8 * i % 40, 8 * i % 40 + 8)) for i in range(10)),
    "sampler that counts": lambda: DataLoader(DATA, batch_size=8, sampler=Counting()),
}
LAYOUTS = {"pp2": Layout(pp=2), "tp2": Layout(tp=2)}


class Sees(L.Callback):
    def __init__(self) -> None:
        self.batches: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(int((batch[0] * torch.arange(1, 17)).sum()))
        self.losses.append(round(float(outputs["loss"]), 4))


Seen = tuple[list[int], list[float]]


def _fit(layout: Layout | None, name: str, **settings: Any) -> Seen:
    sees = Sees()
    strategy, devices = ("auto", 1) if layout is None else (layout.strategy(), layout.world_size)
    callbacks = [sees, *settings.pop("callbacks", ())]
    ckpt_path = settings.pop("ckpt_path", None)
    L.seed_everything(1, verbose=False)
    settings = {"enable_checkpointing": False, "max_epochs": 2, **QUIET, **settings}
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=callbacks, **settings)
    trainer.fit(TinyGPT(num_layers=2), LOADERS[name](), ckpt_path=ckpt_path, weights_only=False)
    return sees.batches, sees.losses


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_planning_takes_nothing_away(workers: WorkerPools, layout: str, name: str) -> None:
    batches, losses = workers(1).run(_fit, None, name)[0]
    assert len(batches) >= 5
    for found, of_rank in workers(2).run(_fit, LAYOUTS[layout], name):
        assert found == batches
        assert of_rank == pytest.approx(losses, abs=2e-4)


def _resumed(layout: Layout | None) -> tuple[Seen, Seen]:
    keeps = ModelCheckpoint("kept", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    whole = _fit(layout, "stateful", enable_checkpointing=True, callbacks=[keeps], max_epochs=1)
    return whole, _fit(layout, "stateful", ckpt_path="kept/step=3.ckpt", max_epochs=1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_resumes_in_the_middle_of_an_epoch(workers: WorkerPools, layout: str) -> None:
    for found in ([workers(1).run(_resumed, None)[0]], workers(2).run(_resumed, LAYOUTS[layout])):
        for whole, resumed in found:
            assert len(whole[0]) == 5
            assert resumed[0] == whole[0][3:]
            assert resumed[1] == pytest.approx(whole[1][3:], abs=2e-4)
