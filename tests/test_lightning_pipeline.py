"""All of Lightning under pipeline stages: every value that a user can see is that of one process, on every rank.

Where a step runs in microbatches it must not show: what a step returns, logs, gives to metrics and keeps in lists and
counters is what it would be for the whole batch.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    LearningRateMonitor,
    ModelSummary,
    ThroughputMonitor,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from tests.models import features, loader, training_loader
from tests.parity import QUIET, Layout
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

LAYOUTS = [
    Layout(pp=2, num_microbatches=3),  # of 3, 3 and 2 samples
    Layout(pp=2, schedule="zbv", num_microbatches=4),
    Layout(pp=2, dp=2, num_microbatches=2),
]


def _is_in_matrix(layout: Layout) -> bool:
    """Where the first layout stands for the others."""
    return layout is not LAYOUTS[0]


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


def _assert_same(workers: WorkerPools, model: type[Net], layout: Layout, **settings: Any) -> None:
    """Every rank has seen what one process has."""
    sizes = SIZES if layout.dp == 1 else ONE_STAGE_SIZES
    reference = workers(1).run(_fit, model, None, sizes, settings)[0]
    assert reference[0] or reference[1], "the reference is empty"
    for rank, seen in enumerate(workers(layout.world_size).run(_fit, model, layout, sizes, settings)):
        _compare(seen, reference, f"rank {rank}")


# ------------------------------------------------------------------------------------------------------------ logging


class _LoggingBlock(nn.Module):
    """Logs from its forward, through a reference that is no submodule."""

    def __init__(self, owner: Sequence[L.LightningModule], name: str) -> None:
        super().__init__()
        self.linear, self.name = nn.Linear(32, 32), name
        object.__setattr__(self, "owner", owner)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.owner[0].log(f"mean_{self.name}", y.mean(), on_step=True, on_epoch=True, sync_dist=True)  # type: ignore[operator, union-attr, index]
        return y


class Logging(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(_LoggingBlock((self,), str(i)) for i in range(4)))
        self.seen: list[Any] = []

    def _log_all(self, batch: Any, kind: str) -> Tensor:
        sync = {"sync_dist": True}
        self.log(f"{kind}_input", batch[0].mean(), on_step=False, on_epoch=True, **sync)  # before the first block
        x = self.first(batch[0])
        self.log(f"{kind}_first", x.square().mean(), True, False, on_step=False, on_epoch=True, **sync)
        logits = self.last(self.layers(x))
        loss = F.cross_entropy(logits, batch[1].argmax(1))
        self.log_dict({f"{kind}_loss": loss, f"{kind}_double": 2 * loss}, on_step=True, on_epoch=True, **sync)
        self.log(f"{kind}_max", logits.max(), reduce_fx="max", on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_min", logits.min(), reduce_fx=torch.min, on_step=False, on_epoch=True, **sync)
        correct = (logits.argmax(1) == batch[1].argmax(1)).sum()
        self.log(f"{kind}_correct", correct, reduce_fx="sum", on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_sized", loss, batch_size=len(batch[0]), on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_unweighted", loss, batch_size=1, on_step=False, on_epoch=True, **sync)
        self.log(f"{kind}_number", 3.0, on_step=False, on_epoch=True, prog_bar=True, **sync)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._log_all(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._log_all(batch, "val")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_log_from_anywhere_in_the_step(workers: WorkerPools, layout: Layout) -> None:
    _assert_same(workers, Logging, layout)


# ------------------------------------------------------------------------------------------------------------ metrics


class Metrics(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, list[Any]] = defaultdict(list)
        self.accuracy = MulticlassAccuracy(CLASSES)
        collection = MetricCollection(
            {
                "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
                "micro_f1": MulticlassF1Score(CLASSES, average="micro"),  # in one compute group with the accuracy
                "f1": MulticlassF1Score(CLASSES),
                "auroc": MulticlassAUROC(CLASSES, thresholds=None),  # keeps all predictions in a list
            }
        )
        self.train_metrics, self.val_metrics = collection.clone(prefix="train_"), collection.clone(prefix="val_")
        self.by_hand = collection.clone(prefix="hand_")
        self.mean_loss, self.sum_loss, self.num_steps = MeanMetric(), SumMetric(), SumMetric()
        self.auroc = MulticlassAUROC(CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits, classes = self.loss(batch)
        self.accuracy(logits, classes)
        self.log("class_accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.train_metrics(logits, classes), on_step=True, on_epoch=False)  # values for the batch
        self.mean_loss.update(loss)
        self.sum_loss(loss)
        self.num_steps.update(1)
        return loss

    def on_train_epoch_end(self) -> None:
        for name in ("mean_loss", "sum_loss", "num_steps"):
            self.seen[name].append(float(getattr(self, name).compute()))
            getattr(self, name).reset()
        self.seen["train"].append({name: float(value) for name, value in self.train_metrics.compute().items()})
        self.train_metrics.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        _, logits, classes = self.loss(batch)
        self.val_metrics.update(logits, classes)
        self.log_dict(self.val_metrics)
        self.by_hand.update(logits, target=classes)
        self.auroc.update(preds=logits, target=classes)

    def on_validation_epoch_end(self) -> None:
        self.seen["hand"].append({name: float(value) for name, value in self.by_hand.compute().items()})
        self.by_hand.reset()
        self.log("auroc", self.auroc.compute(), sync_dist=True)
        self.auroc.reset()


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS[:2], _is_in_matrix), ids=str)
def test_metrics_logged_and_computed_by_hand(workers: WorkerPools, layout: Layout) -> None:
    _assert_same(workers, Metrics, layout)


class SyncedMetrics(Metrics):
    """Without those whose value in one process depends on how many batches there are."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits, classes = self.loss(batch)
        self.accuracy(logits, classes)
        self.log("class_accuracy", self.accuracy, on_step=False, on_epoch=True)
        self.train_metrics.update(logits, classes)
        self.mean_loss.update(loss, weight=len(logits))
        self.sum_loss((logits.argmax(1) == classes).sum())
        self.num_steps.update(len(logits))
        return loss


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.dp > 1], ids=str)
def test_metrics_are_reduced_over_replicas_only(workers: WorkerPools, layout: Layout) -> None:
    _assert_same(workers, SyncedMetrics, layout)


# ------------------------------------------------------------------------------------------- attributes of the module


class Keeping(Net):
    """Keeps results in plain attributes, as one does with on_validation_epoch_end."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.outputs: list[Tensor] = []
        self.by_loader: dict[str, list[Any]] = defaultdict(list)
        self.num_batches, self.num_samples, self.total = 0, 0, 0.0
        self.classes: set[int] = set()
        self.running: Tensor | None = None
        self.register_buffer("average", torch.zeros(()))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("sums", torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.num_batches += 1
        self.register_buffer("positions", torch.arange(5.0), persistent=False)  # as caches of biases are
        loss, logits, _ = self.loss(batch)
        self.num_samples += len(logits)
        self.total += loss.item()
        self.average.mul_(0.9).add_(0.1 * loss.detach())
        self.num_seen += 1
        self.running = loss.detach() if self.running is None else 0.5 * self.running + 0.5 * loss.detach()
        return loss

    def on_train_epoch_end(self) -> None:
        self.seen += [self.num_batches, self.num_samples, self.total, self.average.clone(), int(self.num_seen)]
        self.seen += [self.running, self.average.item()]
        self.seen += [self.get_buffer("positions").clone(), "positions" in self.state_dict()]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits, classes = self.loss(batch)
        self.outputs.append(logits)
        self.by_loader["loss"].append({"loss": loss, "classes": classes})
        self.by_loader["names"].extend([f"class {int(c)}" for c in classes])
        self.classes.update(classes.tolist())

    def on_validation_epoch_end(self) -> None:
        self.seen += [torch.cat(self.outputs), torch.stack([entry["loss"] for entry in self.by_loader["loss"]])]
        self.seen += [list(self.by_loader["names"]), sorted(self.classes)]
        self.outputs.clear()
        self.by_loader.clear()
        self.classes = set()


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.schedule != "zbv"][:1], ids=str)
def test_lists_and_counters_of_the_module(workers: WorkerPools, layout: Layout) -> None:
    _assert_same(workers, Keeping, layout)


def test_counters_in_microbatches_of_one_sample(workers: WorkerPools) -> None:
    _assert_same(workers, Keeping, Layout(pp=2, num_microbatches=8))


class CountsAndConstants(Net):
    """Gives integers that mean different things; in microbatches of equal size they look alike."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.num_steps, self.num_pairs, self.num_samples, self.num_correct = 0, 0, 0, 0
        self.by_class: Counter[int] = Counter()
        self.register_buffer("confusion", torch.zeros(CLASSES, CLASSES, dtype=torch.int64))
        self.positions: Tensor | None = None

    def _count(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, logits, classes = self.loss(batch)
        correct = (logits.argmax(1) == classes).sum()
        self.num_correct += correct.item()  # the trace ends here
        self.num_steps += 1
        self.num_pairs += 2
        self.num_samples += len(classes)
        self.by_class.update(classes.tolist())
        pairs = classes * CLASSES + logits.argmax(1)
        self.confusion += torch.bincount(pairs, minlength=CLASSES**2).view(CLASSES, CLASSES)
        if self.positions is None:
            self.positions = torch.arange(8)  # as long as four microbatches of two samples
        self.log("steps", 1.0, reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("samples", float(len(classes)), reduce_fx="sum", on_step=False, on_epoch=True)
        self.log("correct", correct, reduce_fx="sum", on_step=False, on_epoch=True)
        return loss, correct

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._count(batch)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        _, correct = self._count(batch)
        constants = {"index": batch_idx, "epoch": self.current_epoch, "classes": torch.tensor(CLASSES)}
        return {"correct": correct, "size": len(batch[0]), "positions": self.positions, **constants}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(outputs)

    def on_train_epoch_end(self) -> None:
        self.seen.append((self.num_steps, self.num_pairs, self.num_samples, self.num_correct, dict(self.by_class)))
        self.seen.append((self.confusion.clone(), self.positions))


@pytest.mark.parametrize("num_microbatches", [2, pytest.param(4, marks=pytest.mark.matrix), 8])
def test_integers_are_counts_or_constants_as_in_one_process(workers: WorkerPools, num_microbatches: int) -> None:
    _assert_same(workers, CountsAndConstants, Layout(pp=2, num_microbatches=num_microbatches))


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


class Returning(Net):
    """Returns more than the loss, and looks at what hooks are handed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits, classes = self.loss(batch)
        return {"loss": loss, "logits": logits, "pair": (classes, loss.detach() * 2), "correct": (classes > 1).sum()}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx, len(batch[0])))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("end", batch_idx, outputs))

    def on_after_backward(self) -> None:
        self.seen.append("after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append("before_optimizer_step")

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits, _ = self.loss(batch)
        self.log("val", loss, add_dataloader_idx=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return {"loss": loss, "logits": logits, "index": dataloader_idx}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, dataloader_idx, outputs))


class SeveralLoaders(Returning):
    def val_dataloader(self) -> Any:
        return [DataLoader(Subset(features(40), range(*ends)), batch_size=8) for ends in ((0, 12), (12, 29))]


def _fit_several(layout: Layout | None, settings: dict[str, Any]) -> Any:
    trainer = _trainer(layout, **settings)
    L.seed_everything(SEED, verbose=False)
    module = SeveralLoaders()
    trainer.fit(module, _loaders(layout, SIZES)[0])
    return module.seen, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS[:2], _is_in_matrix), ids=str)
def test_what_steps_return_reaches_the_hooks_as_one_batch(workers: WorkerPools, layout: Layout) -> None:
    _assert_same(workers, Returning, layout)


@pytest.mark.parametrize(
    "settings",
    [
        {"num_sanity_val_steps": 2, "limit_train_batches": 2, "limit_val_batches": 1},
        {"val_check_interval": 2},
        {"accumulate_grad_batches": 2, "overfit_batches": 2},
        {"check_val_every_n_epoch": 2},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_several_validation_dataloaders(workers: WorkerPools, settings: dict[str, Any]) -> None:
    reference = workers(1).run(_fit_several, None, settings)[0]
    for rank, seen in enumerate(workers(2).run(_fit_several, Layout(pp=2, num_microbatches=3), settings)):
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


def _predict(kind: str, layout: Layout | None) -> Any:
    writer = _Writer("batch_and_epoch")
    trainer = _trainer(layout, callbacks=[writer])
    L.seed_everything(SEED, verbose=False)
    inputs = [tuple(sample[:1]) for sample in features(21)]  # the last batch has 5 samples
    predicted = trainer.predict(
        Predicting(kind), [DataLoader(inputs, batch_size=8), DataLoader(inputs[:6], batch_size=4)]
    )
    return predicted, writer.batches, writer.epochs


@pytest.mark.parametrize("kind", ["tensor", "dict", "strings", "numpy", "samples", "none"])
def test_predictions_of_all_batches_in_order_on_every_rank(workers: WorkerPools, kind: str) -> None:
    reference = workers(1).run(_predict, kind, None)[0]
    for layout in LAYOUTS[:2]:
        for rank, seen in enumerate(workers(2).run(_predict, kind, layout)):
            _compare(seen, reference, f"{layout} rank {rank}")


# ------------------------------------------------------------------------------------------- callbacks and schedulers


class Scheduled(Net):
    """Its learning rate depends on what is logged, and it clips by a norm of its own choice."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, _, _ = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch)[0], sync_dist=True)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def on_train_epoch_start(self) -> None:
        optimizer: Any = self.optimizers()
        self.seen.append(optimizer.param_groups[0]["lr"])


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


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS, _is_in_matrix), ids=str)
def test_plateau_scheduler_and_own_clipping(workers: WorkerPools, layout: Layout) -> None:
    _assert_same(workers, Scheduled, layout, max_epochs=4)


def _monitored(layout: Layout | None) -> Any:
    logger = CSVLogger("logs")
    summary = ModelSummary()
    throughput = ThroughputMonitor(batch_size_fn=lambda batch: len(batch[0]), window_size=2)
    trainer = _trainer(
        layout, logger=logger, log_every_n_steps=1, callbacks=[LearningRateMonitor(), throughput, summary],
        enable_model_summary=True,
    )  # fmt: skip
    L.seed_everything(SEED, verbose=False)
    module = Scheduled()
    trainer.fit(module, *_loaders(layout, SIZES))
    shown = summary._summary(trainer, module)
    logger.save()
    path = Path(logger.log_dir) / "metrics.csv"
    rows = list(csv.DictReader(path.open())) if trainer.global_rank == 0 else []
    logged = sorted({name for row in rows for name in row})
    key = f"train{logger.group_separator}samples"
    samples = [row[key] for row in rows if row.get(key)]
    return {
        "parameters": shown.total_parameters,
        "trainable": shown.trainable_parameters,
        "by layer": dict(zip(shown.layer_names, shown.param_nums, strict=True)),
        "logged": logged,
        "samples": samples,
    }


@pytest.mark.parametrize("layout", some_in_matrix(LAYOUTS[:2], _is_in_matrix), ids=str)
def test_summary_learning_rate_and_throughput_monitors(workers: WorkerPools, layout: Layout) -> None:
    reference = workers(1).run(_monitored, None)[0]
    assert reference["parameters"] > 0
    assert reference["samples"]
    seen = workers(layout.world_size).run(_monitored, layout)
    for rank, own in enumerate(seen):
        for key in ("parameters", "trainable", "by layer"):
            assert own[key] == reference[key], f"rank {rank}, {key}"
    assert seen[0]["samples"] == reference["samples"]  # loggers write on rank 0
    assert set(reference["logged"]) <= set(seen[0]["logged"])  # with several devices there are global rates too
