"""All of Lightning's callbacks in {dp 2, pp 2, tp 2}: each gives what it gives in one process, or says why not.

The documentation shows the outcomes. `make test` runs one of them, `make test-matrix` all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from tests.models import TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.refusals import Refusal, markdown_table, refused_or
from tests.workers import WorkerPools

Batch = tuple[Tensor, Tensor]

LAYOUTS = {"dp": Layout(dp=2), "pp": Layout(pp=2), "tp": Layout(tp=2)}


class Model(TinyMLP):
    """Has a backbone and a head, logs learning rates, and predicts."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)
        self.backbone = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU())
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.backbone(x))
        return y

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx)}

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, eps=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Unfreezes(callbacks.BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)  # type: ignore[arg-type]

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)  # type: ignore[arg-type]


class Writes(callbacks.BasePredictionWriter):
    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save(predictions, f"predictions{trainer.global_rank}.pt")


class Records(callbacks.Callback):
    """Notes which hooks are called, in order."""

    def __init__(self) -> None:
        self.called: list[str] = []


def _noting(name: str) -> Callable[..., None]:
    return lambda self, *_, **__: self.called.append(name)


for name in ("setup", *(name for name in vars(callbacks.Callback) if name.startswith("on_"))):
    setattr(Records, name, _noting(name))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One callback."""

    make: Callable[[], callbacks.Callback]
    seen: Callable[[L.Trainer, Any], Any] = lambda trainer, callback: None
    """What it came to know."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    """By axis."""


def predicted(trainer: L.Trainer, callback: Any) -> Any:
    """The number of batches of all replicas."""
    trainer.predict(trainer.lightning_module, torch.utils.data.DataLoader(features(16), batch_size=4))
    replicas = (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"]
    return len(torch.load(f"predictions{trainer.global_rank}.pt")) * replicas


def best(trainer: L.Trainer, callback: Any) -> Any:
    score = round(float(callback.best_model_score), 4)
    return Path(callback.best_model_path).name, score, Path(callback.last_model_path).name


def elapsed(trainer: L.Trainer, callback: Any) -> Any:
    return callback.time_elapsed() > 0


CASES = {
    "BackboneFinetuning": Case(
        make=partial(callbacks.BackboneFinetuning, 1, backbone_initial_lr=0.02, lambda_func=lambda epoch: 1.0),
    ),
    "BaseFinetuning": Case(make=Unfreezes),
    "BasePredictionWriter": Case(make=partial(Writes, "epoch"), seen=predicted),
    "BatchSizeFinder": Case(
        make=callbacks.BatchSizeFinder,
        refused=dict.fromkeys(
            LAYOUTS,
            Refusal(
                message="not supported with distributed strategies|cannot be used with dataloaders",
                reason="memory may run out on one rank, as under DDP",
            ),
        ),
    ),
    "Callback": Case(make=Records, seen=lambda trainer, callback: list(callback.called)),
    "DeviceStatsMonitor": Case(
        make=partial(callbacks.DeviceStatsMonitor, cpu_stats=False), trainer={"logger": CSVLogger}
    ),
    "EarlyStopping": Case(
        make=partial(callbacks.EarlyStopping, "val_loss", patience=1, min_delta=10.0),
        seen=lambda trainer, callback: (callback.stopped_epoch, trainer.current_epoch, trainer.global_step),
        trainer={"epochs": 4},
    ),
    "EMAWeightAveraging": Case(make=partial(callbacks.EMAWeightAveraging, decay=0.9)),
    "GradientAccumulationScheduler": Case(
        make=partial(callbacks.GradientAccumulationScheduler, {0: 2, 1: 1}),
        seen=lambda trainer, callback: trainer.global_step,
    ),
    "LambdaCallback": Case(make=partial(callbacks.LambdaCallback, on_train_epoch_end=lambda *_: None)),
    "LearningRateFinder": Case(
        make=partial(callbacks.LearningRateFinder, num_training_steps=20),
        seen=lambda trainer, callback: round(trainer.lightning_module.lr, 5),
    ),
    "LearningRateMonitor": Case(
        make=partial(callbacks.LearningRateMonitor, log_momentum=True, log_weight_decay=True),
        seen=lambda trainer, callback: callback.lrs,
        trainer={"logger": CSVLogger},
    ),
    "ModelCheckpoint": Case(
        make=partial(callbacks.ModelCheckpoint, "kept", monitor="val_loss", save_last=True, save_top_k=2),
        seen=best,
        trainer={"enable_checkpointing": True},
    ),
    "ModelPruning": Case(
        make=partial(callbacks.ModelPruning, "l1_unstructured", amount=0.5),
        refused={
            "pp": Refusal(message="lies on another pipeline stage", reason="it reads weights of other stages"),
        },
    ),
    "ModelSummary": Case(make=partial(callbacks.ModelSummary, -1), trainer={"enable_model_summary": True}),
    "OnExceptionCheckpoint": Case(
        make=partial(callbacks.OnExceptionCheckpoint, "."), trainer={"enable_checkpointing": True}
    ),
    "RichModelSummary": Case(make=partial(callbacks.RichModelSummary, 2), trainer={"enable_model_summary": True}),
    "RichProgressBar": Case(make=callbacks.RichProgressBar, trainer={"enable_progress_bar": True}),
    "SpikeDetection": Case(make=partial(callbacks.SpikeDetection, warmup=2, window=3, rtol=1.0)),
    "StochasticWeightAveraging": Case(
        make=partial(callbacks.StochasticWeightAveraging, 0.01, swa_epoch_start=1, annealing_epochs=1),
        trainer={"epochs": 3},
    ),
    "TQDMProgressBar": Case(make=callbacks.TQDMProgressBar, trainer={"enable_progress_bar": True}),
    "ThroughputMonitor": Case(
        make=partial(callbacks.ThroughputMonitor, batch_size_fn=lambda batch: len(batch[0]), window_size=2),
        trainer={"logger": CSVLogger},
    ),
    "Timer": Case(make=partial(callbacks.Timer, "00:01:00:00"), seen=elapsed),
    "WeightAveraging": Case(make=callbacks.WeightAveraging),
}


def rendered() -> str:
    """The table of the documentation: the callbacks that a layout refuses, and all others."""
    refused = [name for name, case in CASES.items() if case.refused]
    rows = [[f"`{name}`", *(refused_or(CASES[name].refused, axis, "works") for axis in LAYOUTS)] for name in refused]
    others = ", ".join(f"`{name}`" for name in CASES if name not in refused)
    rows.append([f"all others: {others}", *("works" for _ in LAYOUTS)])
    return markdown_table(["callback", *(f"{axis} 2" for axis in LAYOUTS)], rows)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run with one callback."""

    state: dict[str, Tensor]
    metrics: dict[str, float]
    seen: Any


def run(name: str, layout: Layout | None) -> Outcome:
    case = CASES[name]
    settings = dict(case.trainer)
    if "logger" in settings:
        settings |= {"logger": settings["logger"]("logs"), "log_every_n_steps": 1}
    directory = Path(f"{name} {layout}")
    directory.mkdir(exist_ok=True)
    with contextlib.chdir(directory):
        callback = case.make()
        trainer, _ = fitted(layout, Model, data=features, callbacks=[callback], **settings)
        metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return Outcome(state=whole_state(trainer), metrics=metrics, seen=case.seen(trainer, callback))


def run_all(names: tuple[str, ...]) -> dict[str, Outcome]:
    """In one process."""
    return {name: run(name, None) for name in names}


def run_all_in(names: tuple[str, ...]) -> dict[tuple[str, str], Outcome | str]:
    """On a rank of each layout, with what the error says where there is one."""
    outcomes: dict[tuple[str, str], Outcome | str] = {}
    for name in names:
        for axis, layout in LAYOUTS.items():
            dist.barrier()
            if axis in CASES[name].refused:
                with pytest.raises(Exception, match=CASES[name].refused[axis].message) as error:
                    run(name, layout)
                outcomes[name, axis] = str(error.value)
            else:
                outcomes[name, axis] = run(name, layout)
    return outcomes


@pytest.mark.parametrize("names", [("ModelPruning",), pytest.param(tuple(CASES), marks=pytest.mark.matrix, id="all")])
def test_callbacks_work_or_are_refused(workers: WorkerPools, names: tuple[str, ...]) -> None:
    wanted = tuple(name for name in names if set(CASES[name].refused) != set(LAYOUTS))
    expected = workers(1).run(run_all, wanted)[0]
    for of_rank in workers(2).run(run_all_in, names, timeout=500):
        for (name, axis), outcome in of_rank.items():
            if isinstance(outcome, str):
                continue
            assert_same_state([outcome.state], expected[name].state)
            assert outcome.metrics == pytest.approx(expected[name].metrics, abs=1e-5), (name, axis)
            assert outcome.seen == expected[name].seen, (name, axis)


def test_the_table_has_all_callbacks() -> None:
    bases = {"Checkpoint", "ProgressBar"}
    assert set(callbacks.__all__) - bases == set(CASES)
    assert all(issubclass(getattr(callbacks, name), callbacks.Callback) for name in bases)


class UnfreezesLate(Unfreezes):
    """Steps a scheduler between what it notes of the groups and the checkpoint."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] *= 0.7


def go_on(layout: Layout | None) -> tuple[dict[str, Tensor], list[tuple[float, int]]]:
    """Fit on from a checkpoint written after a group was added."""
    with contextlib.chdir(_made(f"resumed {layout}")):
        kept = callbacks.ModelCheckpoint("kept", save_last=True)
        settings: dict[str, Any] = {"data": features, "enable_checkpointing": True}
        fitted(layout, Model, callbacks=[UnfreezesLate(), kept], **settings)
        trainer, _ = fitted(
            layout, Model, callbacks=[UnfreezesLate()], epochs=3, ckpt_path="kept/last.ckpt", **settings
        )
        groups = [(group["lr"], len(group["params"])) for group in trainer.optimizers[0].param_groups]
        return whole_state(trainer), groups


def _made(directory: str) -> Path:
    Path(directory).mkdir(exist_ok=True)
    return Path(directory)


def test_groups_that_finetuning_added_go_on_from_a_checkpoint(workers: WorkerPools) -> None:
    state, groups = workers(1).run(go_on, None)[0]
    assert len(groups) == 2
    for layout in (Layout(dp=2, zero=2), Layout(pp=2)):
        for ours, our_groups in workers(2).run(go_on, layout):
            assert [number for _, number in our_groups] == [number for _, number in groups]
            assert [lr for lr, _ in our_groups] == pytest.approx([lr for lr, _ in groups])
            assert_same_state([ours], state)
