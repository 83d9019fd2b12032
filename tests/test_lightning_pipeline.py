"""All of Lightning under pipeline stages: every value that a user can see is that of one process, on every rank.

Where a step runs in microbatches it must not show: what a step returns, logs, gives to metrics and keeps in lists and
counters is what it would be for the whole batch.
"""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

from tests.models import features, loader, training_loader
from tests.parity import QUIET, Layout
from tests.workers import WorkerError, WorkerPools

PIPELINE = Layout(pp=2, num_microbatches=3)  # of 3, 3 and 2 samples
BATCH, SEED, CLASSES = 8, 1, 4
SIZES = (29, 21)  # samples for training and validation: the last batches are smaller
ONE_STAGE_SIZES = (32, 16)  # all batches are full, so that data-parallel ranks share them evenly


class Net(L.LightningModule):
    """Classification by five layers; a batch is `(features, targets)`, (B, 8) and (B, 4) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        self.last = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.layers(self.first(x)))
        return y

    def loss(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, logits, and classes of the targets."""
        logits, classes = self(batch[0]), batch[1].argmax(1)
        return F.cross_entropy(logits, classes), logits, classes

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loaders(layout: Layout | None, sizes: tuple[int, int]) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """For training and validation; without a layout those of one process, in the same order."""
    samples = features(sum(sizes))
    train, val = Subset(samples, range(sizes[0])), Subset(samples, range(sizes[0], sum(sizes)))
    dp = 1 if layout is None else layout.dp
    first = training_loader(train, global_batch_size=BATCH, data_parallel_size=dp, seed=SEED)
    return first, loader(val, global_batch_size=BATCH, data_parallel_size=dp)


def _trainer(layout: Layout | None, **settings: Any) -> L.Trainer:
    strategy: Any = "auto" if layout is None else layout.strategy()
    devices = 1 if layout is None else layout.world_size
    return L.Trainer(
        **{
            **QUIET,
            "enable_checkpointing": False,
            "devices": devices,
            "strategy": strategy,
            "max_epochs": 2,
            **settings,
        }
    )


def _fit(model: type[Net], layout: Layout | None, sizes: tuple[int, int], settings: dict[str, Any]) -> Any:
    """Train and return what the model has seen: its attribute `seen`, and all that was logged."""
    trainer = _trainer(layout, **settings)
    L.seed_everything(SEED, verbose=False)
    module: Any = model()
    trainer.fit(module, *_loaders(layout, sizes))
    return module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


def _compare(seen: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(seen, expected, atol=1e-5, rtol=0, msg=lambda message: f"{where}: {message}")
    elif isinstance(expected, np.ndarray):
        np.testing.assert_allclose(seen, expected, atol=1e-5, err_msg=where)
    elif isinstance(expected, dict):
        assert seen.keys() == expected.keys(), where
        for key in expected:
            _compare(seen[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(seen) == len(expected), f"{where}: {len(seen)} entries, expected {len(expected)}"
        for i, entry in enumerate(expected):
            _compare(seen[i], entry, f"{where}[{i}]")
    else:
        assert seen == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected), where


# ------------------------------------------------------------------------------------------- attributes of the module


class _Shares(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).softmax(1)


class ChecksItsBlocks(Net):
    """Can't run on random outputs of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.last = _Shares(32, CLASSES)
        self.num_steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_steps += 1
        shares = self(batch[0])
        if not torch.allclose(shares.sum(1), torch.ones(len(shares))):
            raise ValueError("these are no shares")
        return F.nll_loss(shares.log(), batch[1].argmax(1))


def test_counter_that_may_count_steps_or_samples_is_refused(workers: WorkerPools) -> None:
    expected = (
        r"the growth of self\.num_steps is 1, 1, 1, 1, \.\.\. in the microbatches of a batch, of 1, 1, 1, 1, \.\.\."
    )
    with pytest.raises(WorkerError, match=expected) as failed:
        workers(2).run(_fit, ChecksItsBlocks, Layout(pp=2, num_microbatches=8), SIZES, {"limit_val_batches": 0})
    assert failed.value.failures.keys() == {0, 1}


class Settings(dict[str, int]):
    """Its entries are set by its methods only."""


class KeepsElsewhere(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.settings = Settings()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.settings["num_steps"] = batch_idx + 1
        return self.loss(batch)[0]


def test_changes_in_containers_of_other_classes_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"A step changed what is in self\.settings, a Settings") as failed:
        workers(2).run(_fit, KeepsElsewhere, Layout(pp=2, num_microbatches=2), SIZES, {"limit_val_batches": 0})
    assert failed.value.failures.keys() == {0, 1}


# --------------------------------------------------------------------------------------------------- steps' outputs


class SeveralLoaders(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits, _ = self.loss(batch)
        self.log("val", loss, add_dataloader_idx=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return {"loss": loss, "logits": logits, "index": dataloader_idx}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, dataloader_idx, outputs))

    def val_dataloader(self) -> Any:
        return [DataLoader(Subset(features(40), range(*ends)), batch_size=8) for ends in ((0, 12), (12, 29))]


def _fit_several(layout: Layout | None, settings: dict[str, Any]) -> Any:
    trainer = _trainer(layout, **settings)
    L.seed_everything(SEED, verbose=False)
    module = SeveralLoaders()
    trainer.fit(module, _loaders(layout, SIZES)[0])
    return module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {"num_sanity_val_steps": 2, "val_check_interval": 2, "limit_val_batches": 1},
        {"accumulate_grad_batches": 2, "overfit_batches": 2},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_several_validation_dataloaders(workers: WorkerPools, settings: dict[str, Any]) -> None:
    reference = workers(1).run(_fit_several, None, settings)[0]
    for rank, seen in enumerate(workers(2).run(_fit_several, PIPELINE, settings)):
        _compare(seen, reference, f"rank {rank}")


# ------------------------------------------------------------------------------------------------------- predictions


class Predicting(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits = self(batch[0])  # no labels
        answers = {
            "tensor": lambda: logits,
            "dict": lambda: {"logits": logits, "names": [f"class {i}" for i in logits.argmax(1)], "batch": batch_idx},
            "strings": lambda: [f"{batch_idx}: class {i}" for i in logits.argmax(1)],
            "numpy": lambda: logits.numpy(),
            "samples": lambda: [{"class": logits[i].argmax(), "scores": logits[i]} for i in range(len(logits))],
            "none": lambda: None,
        }
        return answers[self.kind]()


class _Writer(BasePredictionWriter):
    def __init__(self, write_interval: Any) -> None:
        super().__init__(write_interval)
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *args: Any) -> None:
        self.batches.append((list(batch_indices), prediction))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((batch_indices, predictions))


KINDS = ("tensor", "dict", "strings", "numpy", "samples", "none")


def _predicted(layout: Layout | None) -> Any:
    found = {}
    for kind in KINDS:
        writer = _Writer("batch_and_epoch")
        trainer = _trainer(layout, callbacks=[writer])
        L.seed_everything(SEED, verbose=False)
        inputs = [tuple(sample[:1]) for sample in features(21)]  # the last batch has 5 samples
        loaders = [DataLoader(inputs, batch_size=8), DataLoader(inputs[:6], batch_size=4)]
        found[kind] = trainer.predict(Predicting(kind), loaders), writer.batches, writer.epochs
    return found


def test_predictions_of_all_batches_in_order_on_every_rank(workers: WorkerPools) -> None:
    reference = workers(1).run(_predicted, None)[0]
    for rank, seen in enumerate(workers(2).run(_predicted, PIPELINE)):
        _compare(seen, reference, f"rank {rank}")


class SeesOldGradients(Net):
    """Looks at the gradients that the optimizer has used, in the hook that Lightning calls before clearing them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        last = self.last.weight.grad
        self.seen.append(0.0 if last is None else float(_whole(last).norm()))

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch)[0])


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def _seen_on_last_stage(model: type[Net], layout: Layout | None) -> list[float]:
    seen, _ = _fit(model, layout, ONE_STAGE_SIZES, {"max_epochs": 1})
    return list(seen)


def test_used_gradients_are_there_before_zero_grad(workers: WorkerPools) -> None:
    layout = Layout(pp=2, num_microbatches=2)
    expected = _seen_on_last_stage(SeesOldGradients, None)
    seen = workers(layout.world_size).run(_seen_on_last_stage, SeesOldGradients, layout)[-1]
    assert len(expected) > 2
    assert expected[0] == 0.0
    assert all(norm > 0 for norm in expected[1:])
    assert seen == pytest.approx(expected, abs=1e-5)
