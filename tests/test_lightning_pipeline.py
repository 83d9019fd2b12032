"""Evaluation and hooks under pipeline stages: every value that a user can see is that of one process, on every rank."""

from __future__ import annotations

import gc
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_3d.pipeline.schedule import Schedule
from tests.models import TinyGPT, TinyMLP, features, reference_loader, tokens
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools

PIPELINE = Layout(pp=2, num_microbatches=3)  # of 3, 3 and 2 samples
KINDS = ("tensor", "dict", "strings", "numpy", "samples", "none")


class Model(TinyMLP):
    """Has several loaders for validation, predicts in many forms, and looks at gradients that were used."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.kind = ""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = self(batch[0])
        loss = (output - batch[1]).square().mean()
        self.log("val", loss, add_dataloader_idx=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return {"loss": loss, "output": output, "index": dataloader_idx}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((batch_idx, dataloader_idx, outputs))

    def val_dataloader(self) -> Any:
        return [DataLoader(Subset(features(40), range(*ends)), batch_size=8) for ends in ((0, 12), (12, 29))]

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.layers[-1].weight.grad
        if gradient is not None:  # on the last stage, from the second step on
            self.seen.append(float(gradient.norm()))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        output = self(batch[0])
        answers = {
            "tensor": lambda: output,
            "dict": lambda: {"output": output, "names": [f"class {i}" for i in output.argmax(1)], "batch": batch_idx},
            "strings": lambda: [f"{batch_idx}: class {i}" for i in output.argmax(1)],
            "numpy": lambda: output.numpy(),
            "samples": lambda: [{"class": output[i].argmax(), "scores": output[i]} for i in range(len(output))],
            "none": lambda: None,
        }
        return answers[self.kind]()


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *args: Any) -> None:
        self.batches.append((list(batch_indices), prediction))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epochs.append((batch_indices, predictions))


def _trainer(layout: Layout | None, **settings: Any) -> L.Trainer:
    strategy, devices = ("auto", 1) if layout is None else (layout.strategy(), layout.world_size)
    defaults: dict[str, Any] = {**QUIET, "enable_checkpointing": False, "max_epochs": 2}
    return L.Trainer(**{**defaults, "devices": devices, "strategy": strategy, **settings})


def _fit(layout: Layout | None, settings: dict[str, Any]) -> Any:
    L.seed_everything(1, verbose=False)
    trainer, module = _trainer(layout, **settings), Model()
    trainer.fit(module, reference_loader(features(29), global_batch_size=8, seed=1))
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


@pytest.mark.parametrize(
    "settings",
    [
        {"num_sanity_val_steps": 2, "val_check_interval": 2, "limit_val_batches": 1},
        {"accumulate_grad_batches": 2, "overfit_batches": 2},
    ],
    ids=lambda settings: "-".join(settings),
)
def test_several_validation_dataloaders_and_used_gradients(workers: WorkerPools, settings: dict[str, Any]) -> None:
    expected, metrics = workers(1).run(_fit, None, settings)[0]
    gradients = [entry for entry in expected if isinstance(entry, float)]
    assert gradients or "overfit_batches" in settings
    assert all(norm > 0 for norm in gradients)
    outputs = [entry for entry in expected if not isinstance(entry, float)]
    first, last = workers(2).run(_fit, PIPELINE, settings)
    _compare(first, (outputs, metrics), "rank 0")
    _compare(last, (expected, metrics), "rank 1")


def _predicted(layout: Layout | None) -> Any:
    found = {}
    for kind in KINDS:
        L.seed_everything(1, verbose=False)
        writer, model = Writer(), Model()
        model.kind = kind
        inputs = [tuple(sample[:1]) for sample in features(21)]  # without targets; the last batch has 5 samples
        loaders = [DataLoader(inputs, batch_size=8), DataLoader(inputs[:6], batch_size=4)]
        found[kind] = _trainer(layout, callbacks=[writer]).predict(model, loaders), writer.batches, writer.epochs
    return found


def test_predictions_of_all_batches_in_order_on_every_rank(workers: WorkerPools) -> None:
    reference = workers(1).run(_predicted, None)[0]
    for rank, seen in enumerate(workers(2).run(_predicted, PIPELINE)):
        _compare(seen, reference, f"rank {rank}")


# ------------------------------------------------------------------------------------------------------ many lengths


def _schedules_after_lengths(layout: Layout) -> int:
    batches = [tuple(tensor[:, :length] for tensor in tokens(4)[:]) for length in (4, 6, 8, 10, 12)]
    settings = {**QUIET, "max_steps": len(batches), "enable_checkpointing": False}
    trainer = L.Trainer(devices=layout.world_size, strategy=layout.strategy(), **settings)
    trainer.fit(TinyGPT(), DataLoader(batches, batch_size=None))
    return sum(isinstance(thing, Schedule) for thing in gc.get_objects())


def test_batches_of_many_lengths_leave_two_schedules_with_their_buffers(workers: WorkerPools) -> None:
    assert max(workers(2).run(_schedules_after_lengths, Layout(pp=2, num_microbatches=2))) <= 2
