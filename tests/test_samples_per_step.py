"""``samples_per_step``: the same steps on any number of ranks, also where a run goes on with another number of them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigError
from tests.parity import QUIET
from tests.workers import WorkerPools

SAMPLES, PER_STEP = 50, 12
"""Of an epoch, and in a step: five steps an epoch, the last of which is filled up."""


class Numbered(Dataset[tuple[int, Tensor]]):
    """Samples that tell their number."""

    def __init__(self) -> None:
        self.x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.x[index]


class Model(L.LightningModule):
    """Drops, and notes the samples and the loss of each batch by its step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 1))
        self.noted: dict[int, list[tuple[int, float]]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        numbers, x = batch
        loss = self.layers(x).pow(2).mean()
        self.noted.setdefault(self.global_step, []).extend((number, float(loss)) for number in numbers.tolist())
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.layers(batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class ByHand(Model):
    """Steps by itself."""

    automatic_optimization = False


@dataclass(frozen=True, kw_only=True)
class Run:
    """A fit up to a step."""

    ranks: int
    until: int
    settings: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 1


class SavesInValidation(L.Callback):
    """Saves when the last step has been validated."""

    def __init__(self, saved: Path, step: int) -> None:
        self.saved, self.step = saved, step

    def on_validation_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.saved)


def _fit(
    run: Run,
    folder: Path,
    *,
    goes_on: bool,
    shuffle: bool = True,
    drop_last: bool = False,
    validates: bool = False,
) -> Any:
    L.seed_everything(1, verbose=False)
    strategy = ThreeDStrategy(samples_per_step=PER_STEP, **run.settings)
    model, saved = Model(), folder / "last.ckpt"
    trainer = L.Trainer(
        **QUIET,
        devices=run.ranks,
        strategy=strategy,
        max_steps=run.until,
        max_epochs=-1,
        callbacks=[SavesInValidation(saved, run.until)] if validates else [],
        enable_checkpointing=False,
    )
    loader = DataLoader(Numbered(), batch_size=run.batch_size, shuffle=shuffle, drop_last=drop_last)
    validated = DataLoader(Numbered(), batch_size=10) if validates else None
    trainer.fit(model, loader, validated, ckpt_path=saved if goes_on else None)
    if not validates:
        trainer.save_checkpoint(saved)
    return model.noted


def _noted(workers: WorkerPools, folder: Path, *runs: Run, **data: bool) -> dict[int, tuple[list[int], float]]:
    """Step -> its samples and their mean loss, of runs of which each goes on where the one before it was."""
    folder.mkdir()
    found = dict[int, tuple[list[int], float]]()
    for number, run in enumerate(runs):
        of_ranks = workers(run.ranks).run(partial(_fit, run, folder, goes_on=number > 0, **data))
        per_replica = run.ranks if not run.settings else run.ranks // 2
        for step in of_ranks[0]:
            pairs = [pair for noted in of_ranks[:: run.ranks // per_replica] for pair in noted[step]]
            found[step] = sorted(sample for sample, _ in pairs), sum(loss for _, loss in pairs) / len(pairs)
    return found


def _are_alike(found: dict[int, tuple[list[int], float]], expected: dict[int, tuple[list[int], float]]) -> None:
    assert found.keys() == expected.keys()
    for step, (samples, loss) in expected.items():
        assert found[step][0] == samples, step
        assert len(samples) == PER_STEP
        assert found[step][1] == pytest.approx(loss, rel=1e-5), step


def test_the_curve_is_that_of_one_process(workers: WorkerPools, tmp_path: Path) -> None:
    """4, then 2, then 3 ranks, in the middle of epochs: every sample once, with what it drops."""
    one = _noted(workers, tmp_path / "one", Run(ranks=1, until=13))
    runs = [Run(ranks=4, until=3), Run(ranks=2, until=8), Run(ranks=3, until=13)]
    _are_alike(_noted(workers, tmp_path / "some", *runs), one)
    epoch = sorted(sample for step in range(5) for sample in one[step][0])
    assert set(epoch) == set(range(SAMPLES))
    assert len(epoch) == 60
    assert one[0][0] != one[5][0], "epochs are shuffled anew"


def test_batches_have_the_same_samples(workers: WorkerPools, tmp_path: Path) -> None:
    """Larger ones, as what a dropout leaves, or a padding adds, depends on all of them; from an epoch's end, too."""
    one = _noted(workers, tmp_path / "one", Run(ranks=1, until=8, batch_size=2))
    runs = [Run(ranks=3, until=5, batch_size=2), Run(ranks=2, until=8, batch_size=2)]
    _are_alike(_noted(workers, tmp_path / "some", *runs), one)


def test_an_epoch_that_a_validation_saved_is_complete(workers: WorkerPools, tmp_path: Path) -> None:
    """Another number of ranks goes on with the next one."""
    one = _noted(workers, tmp_path / "one", Run(ranks=1, until=8), validates=True)
    found = _noted(workers, tmp_path / "some", Run(ranks=1, until=5), Run(ranks=2, until=8), validates=True)
    _are_alike(found, one)


def test_layouts_take_as_many_samples(workers: WorkerPools, tmp_path: Path) -> None:
    """Replicas of two tensor-parallel ranks, at stage 3, and a larger batch; in the order of the dataset."""
    one = _noted(workers, tmp_path / "one", Run(ranks=1, until=6), shuffle=False, drop_last=True)
    assert [sample for step in range(4) for sample in one[step][0]] == list(range(48))
    shared = Run(ranks=4, until=4, settings={"tensor_parallel_size": 2, "zero": {"stage": 3}})
    found = _noted(workers, tmp_path / "tp", shared, Run(ranks=3, until=6), shuffle=False, drop_last=True)
    _are_alike(found, one)


def _refused(trainer: dict[str, Any], batch_size: int, kind: str) -> str:
    model = ByHand() if kind == "by hand" else Model()
    loader: Any = DataLoader(Numbered(), batch_size=batch_size)
    trainer = {**QUIET, **trainer, "devices": 2, "max_steps": 1}
    with pytest.raises(ConfigError) as raised:
        L.Trainer(**trainer, strategy=ThreeDStrategy(samples_per_step=PER_STEP)).fit(
            model, [loader, loader] if kind == "two" else loader
        )
    return str(raised.value)


@pytest.mark.parametrize(
    ("trainer", "batch_size", "kind", "message"),
    [
        ({}, 5, "", "no multiple of the 10 samples in a batch of 5 on each of 2 replicas: use 10, 20, another"),
        ({"accumulate_grad_batches": 2}, 1, "", "but so do Trainer.accumulate_grad_batches=2."),
        ({"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}, 1, "", "GradientAccumulationScheduler"),
        ({}, 1, "by hand", "manual optimization: use one of them"),
        (
            {},
            1,
            "two",
            "needs one training dataloader .*, but there are 2, the first a DataLoader",
        ),
    ],
)
def test_what_can_t_be_is_refused(
    workers: WorkerPools, trainer: dict[str, Any], batch_size: int, kind: str, message: str
) -> None:
    for line in workers(2).run(_refused, trainer, batch_size, kind):
        assert line.startswith(f"samples_per_step={PER_STEP}")
        assert re.search(message, line)
