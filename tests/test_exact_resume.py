"""A run that resumes goes on as if it had not stopped: to the bit in the same layout, else to floating-point order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.parity import QUIET, Layout, whole_state
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

WIDTH, BATCHES, EPOCHS = 8, 5, 3
"""BATCHES of an epoch."""

Draws = Literal["nothing", "blocks", "glue"]
Data = Literal["shuffled", "workers", "stream", "stateful"]

LAYOUTS = [
    Layout(dp=2),
    Layout(pp=2, save_distributed_checkpoint=True),
    Layout(tp=2),
    Layout(dp=2, zero=3, save_distributed_checkpoint=True),
    Layout(pp=2, schedule="interleaved_zero_bubble", stages_per_rank=2),
]


class Block(nn.Module):
    """A residual layer that may drop."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = nn.Linear(WIDTH, WIDTH), rate

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.inner(x)), self.rate, self.training)


class Model(L.LightningModule):
    """Draws random numbers in one place; a batch is (B, WIDTH) and (B, 1)."""

    def __init__(self, draws: Draws, *, norm: bool = False) -> None:
        super().__init__()
        self.draws, self.generator = draws, np.random.default_rng(5) if draws == "glue" else None
        self.blocks = nn.ModuleList(Block(0.3 if draws == "blocks" else 0.0) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        if self.generator is not None:
            x = x + torch.rand_like(x) * random.random() * np.random.rand() + self.generator.random()
        for block in self.blocks:
            x = block(x)
        loss = F.mse_loss(self.head(self.norm(x)), target)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to samples."""

    def __init__(self) -> None:
        self.x, self.y = _samples()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + torch.rand(()).item(), self.y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples without a length, in a random order."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = _samples()
        for index in torch.randperm(len(x)).tolist():
            yield x[index] + torch.rand(()).item(), y[index]


class Stateful:
    """A dataloader that knows its place, as those of torchdata."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.position, self.start = loader, 0, 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.position, self.start = self.start, 0
        for batch in list(self.loader)[self.position :]:
            self.position += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["position"] % len(self)


def _samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(8 * BATCHES, WIDTH, generator=generator), torch.randn(8 * BATCHES, 1, generator=generator)


def _loader(data: Data, dp: int) -> Any:
    size = 8 // dp
    if data == "stream":
        return DataLoader(Stream(), batch_size=8)
    if data == "workers":
        return DataLoader(Augmented(), batch_size=size, shuffle=True, num_workers=2)
    loader = DataLoader(TensorDataset(*_samples()), batch_size=size, shuffle=data == "shuffled")
    return Stateful(loader) if data == "stateful" else loader


class Saves(L.Callback):
    """Notes losses, and saves after some batches and epochs."""

    def __init__(self, after: tuple[int, ...] = (), after_epoch: int | None = None) -> None:
        self.after, self.after_epoch = after, after_epoch
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss"]))
        if len(self.losses) in self.after:
            trainer.save_checkpoint(f"{len(self.losses)}.ckpt")

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == self.after_epoch:
            trainer.save_checkpoint("epoch.ckpt")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained, and how."""

    draws: Draws = "nothing"
    data: Data = "shuffled"
    norm: bool = False
    precision: Any = "32-true"
    after: tuple[int, ...] = (7, 2 * BATCHES)
    """Batches after which checkpoints are saved."""


@dataclass
class Run:
    """What one rank saw of a run."""

    losses: list[float]
    weights: dict[str, Tensor]


def _trained(
    layout: Layout | None,
    case: Case,
    saves: Saves,
    *,
    other_numbers: bool = False,
    path: str | None = None,
    max_steps: int = -1,
    saved_at_end: str | None = None,
) -> Run:
    """Train; `other_numbers`: with other random states than a run has that was just seeded, as an unseeded one has."""
    L.seed_everything(1, verbose=False)
    model = Model(case.draws, norm=case.norm)
    if other_numbers:
        torch.manual_seed(99)
        random.seed(99)
        np.random.seed(99)
    trainer = L.Trainer(
        strategy="auto" if layout is None else layout.strategy(),
        devices=1 if layout is None else layout.world_size,
        max_epochs=EPOCHS,
        max_steps=max_steps,
        callbacks=[saves],
        precision=case.precision,
        enable_checkpointing=False,
        **QUIET,
    )
    trainer.fit(model, _loader(case.data, 1 if layout is None else layout.dp), ckpt_path=path)
    if saved_at_end is not None:
        trainer.save_checkpoint(saved_at_end)
    return Run(saves.losses, whole_state(trainer))


def _uninterrupted_and_resumed(layout: Layout | None, case: Case) -> tuple[Run, dict[str, tuple[int, Run]]]:
    """The run that saves, and those that go on after so many batches, by file."""
    whole = _trained(layout, case, Saves(case.after, after_epoch=1))
    starts = {f"{number}.ckpt": number for number in case.after} | {"epoch.ckpt": 2 * BATCHES}
    resumed = {
        path: (start, _trained(layout, case, Saves(), other_numbers=True, path=path)) for path, start in starts.items()
    }
    return whole, resumed


DRAWING = Case(draws="blocks")
CASES = [
    *((layout, DRAWING) for layout in LAYOUTS[:4]),
    (LAYOUTS[4], DRAWING),
    (Layout(), Case(draws="glue")),
    (Layout(pp=2), Case(data="stateful", after=(7,))),
    (Layout(tp=2), Case(data="stream", after=(7,))),
    (Layout(), Case(data="stream", after=(BATCHES,))),
    (Layout(pp=2), Case(draws="blocks", norm=True)),
    (Layout(dp=2, zero=2), Case(draws="blocks", precision="16-true")),
    (Layout(), Case(data="workers", after=(7,))),
]
"""Draws in every kind of layout; then data, statistics, and scales with master weights."""


@pytest.mark.parametrize(
    ("layout", "case"),
    some_in_matrix(CASES, lambda layout, case: case.data == "workers" or layout == LAYOUTS[4]),
    ids=str,
)
def test_losses_go_on_to_the_bit(workers: WorkerPools, layout: Layout, case: Case) -> None:
    for whole, resumed in workers(layout.world_size).run(_uninterrupted_and_resumed, layout, case):
        assert len(whole.losses) == BATCHES * EPOCHS
        for path, (start, run) in resumed.items():
            assert run.losses == whole.losses[start:], path
            assert all(torch.equal(run.weights[fqn], value) for fqn, value in whole.weights.items()), path


def _uninterrupted_and_cut(layout: Layout, max_steps: int) -> tuple[list[float], dict[str, list[float]]]:
    """The losses of a run, and of those that go on where `max_steps` cut another, by file and limit."""
    whole = _trained(layout, DRAWING, Saves())
    cut = Saves(after_epoch=(max_steps - 1) // BATCHES)
    _trained(layout, DRAWING, cut, max_steps=max_steps, saved_at_end="fit.ckpt")
    resumed = {
        f"{path}, {limit}": cut.losses + _trained(layout, DRAWING, Saves(), path=path, max_steps=limit).losses
        for path, limit in (("epoch.ckpt", BATCHES * EPOCHS), ("fit.ckpt", BATCHES * EPOCHS), ("fit.ckpt", -1))
    }
    return whole.losses, resumed


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("max_steps", [7, 2 * BATCHES], ids=["in the middle of an epoch", "at its end"])
def test_a_run_goes_on_where_max_steps_cut_it(workers: WorkerPools, layout: Layout, max_steps: int) -> None:
    for whole, resumed in workers(layout.world_size).run(_uninterrupted_and_cut, layout, max_steps):
        for file, losses in resumed.items():
            assert losses == whole, file
