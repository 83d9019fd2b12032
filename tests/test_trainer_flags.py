"""Every argument of the Trainer does on one device with strategy="3d" what it does without a strategy."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import logging
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.checkpoint.run_state import RUN
from tests.workers import WorkerPools

NUM_BATCHES, BATCH_SIZE = 6, 4


class Model(L.LightningModule):
    """Draws random numbers, has running statistics, logs everywhere, counts what it is called for and skips a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4))
        self.calls: list[str] = []
        self.grad_norms: list[float] = []

    def _loss(self, batch: list[Tensor], name: str) -> Tensor:
        self.calls.append(name)
        loss = F.mse_loss(self.layers(batch[0]), batch[1])
        self.log(f"{name}_loss", loss, on_step=name == "train", on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = self._loss(batch, "train")
        # Not where torch would clip an empty list of gradients by value, which raises.
        return None if batch_idx == 3 and self.trainer.gradient_clip_algorithm != "value" else loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "val")

    def test_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "test")

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.layers(batch[0])  # type: ignore[no-any-return]

    def on_validation_start(self) -> None:
        self.calls.append(f"grad {torch.is_grad_enabled()}")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("step")

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(optimizer, *args, **kwargs)
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.grad_norms.append(torch.nn.utils.get_total_norm(gradients).item())

    def configure_optimizers(self) -> Any:
        # Not Adam, whose steps for gradients of some 0 depend on how these were rounded.
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    # ---- data

    def _loader(self, *, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
        self.calls.append("loader")
        inputs = torch.randn(NUM_BATCHES * BATCH_SIZE, 8, generator=torch.Generator().manual_seed(5))
        return DataLoader(TensorDataset(inputs, inputs[:, :4]), batch_size=BATCH_SIZE, shuffle=shuffle)

    def train_dataloader(self) -> Any:
        return self._loader(shuffle=True)

    def val_dataloader(self) -> Any:
        return self._loader()

    test_dataloader = predict_dataloader = val_dataloader


def _with(**flags: Any) -> Callable[[], dict[str, Any]]:
    return lambda: flags


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": _with(),
    "accelerator": _with(accelerator="auto"),
    "devices-list": _with(devices="auto"),
    "precision": _with(precision="bf16-mixed"),
    "logger-off": _with(logger=False),
    "callbacks": lambda: {
        "callbacks": [
            callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0),
            callbacks.LearningRateMonitor(),
            callbacks.Timer(duration=timedelta(hours=1)),
        ]
    },
    "fast_dev_run": _with(fast_dev_run=True),
    "max_epochs": _with(max_epochs=3),
    "max_epochs-0": _with(max_epochs=0),
    "min_epochs": lambda: {
        "min_epochs": 3,
        "max_epochs": 4,
        "callbacks": [callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)],
    },
    "max_steps": _with(max_steps=8, max_epochs=-1),
    "max_steps-0": _with(max_steps=0),
    "min_steps": lambda: {
        "min_steps": 14,
        "max_epochs": 4,
        "callbacks": [callbacks.EarlyStopping("val_loss", patience=0, min_delta=10.0)],
    },
    "max_time": _with(max_time="00:00:00:00"),
    "limit_train_batches": _with(limit_train_batches=2),
    "limit_train_batches-0": _with(limit_train_batches=0),
    "limit_val_batches": _with(limit_val_batches=3),
    "limit_val_batches-0": _with(limit_val_batches=0),
    "limit_test_batches": _with(limit_test_batches=0.34),
    "limit_predict_batches": _with(limit_predict_batches=1),
    "overfit_batches": _with(overfit_batches=2),
    "val_check_interval": _with(val_check_interval=2),
    "val_check_interval-part": _with(val_check_interval=0.5),
    "val_check_interval-over-epochs": _with(val_check_interval=4, check_val_every_n_epoch=None),
    "check_val_every_n_epoch": _with(check_val_every_n_epoch=2, max_epochs=4),
    "num_sanity_val_steps": _with(num_sanity_val_steps=3),
    "log_every_n_steps": _with(log_every_n_steps=4),
    "enable_checkpointing": _with(enable_checkpointing=True),
    "enable_progress_bar": _with(enable_progress_bar=True),
    "enable_model_summary": _with(enable_model_summary=True),
    "accumulate_grad_batches": _with(accumulate_grad_batches=4),
    "gradient_clip_val": _with(gradient_clip_val=0.1),
    "gradient_clip_algorithm": _with(gradient_clip_val=0.01, gradient_clip_algorithm="value"),
    "deterministic": _with(deterministic=True),
    "benchmark": _with(benchmark=True),
    "inference_mode": _with(inference_mode=False),
    "use_distributed_sampler": _with(use_distributed_sampler=False),
    "profiler": _with(profiler="simple"),
    "detect_anomaly": _with(detect_anomaly=True),
    "barebones": _with(barebones=True),
    "plugins": lambda: {"plugins": [TorchCheckpointIO(), TorchElasticEnvironment()], "enable_checkpointing": True},
    "sync_batchnorm": _with(sync_batchnorm=True),
    "reload_dataloaders_every_n_epochs": _with(reload_dataloaders_every_n_epochs=1),
    "default_root_dir": _with(default_root_dir="elsewhere", enable_checkpointing=True),
    "enable_autolog_hparams": _with(enable_autolog_hparams=False),
    "model_registry": _with(model_registry="registered"),
    "num_nodes": _with(num_nodes=1),
}
"""Arguments by the name of what they show, which begins with the argument's."""

SUMMED_OTHERWISE = ("gradient_clip_val",)
"""Cases with a norm of all gradients, which is summed in another order."""

OFF_BY_DEFAULT = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def _flags(case: str) -> dict[str, Any]:
    """The arguments of a case, with those that keep other cases small."""
    flags = CASES[case]()
    if not flags.get("barebones"):
        flags = {"log_every_n_steps": 1, **dict.fromkeys(OFF_BY_DEFAULT, False), **flags}
        flags.setdefault("logger", CSVLogger("logs", name="run"))
    if "strategy" not in flags:
        flags = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, **flags}
    return flags


def _run(case: str, strategy: str, folder: Path) -> dict[str, Any]:
    """Fit, validate, test and predict; returns all that a user could see of it."""
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        L.seed_everything(3, verbose=False)
        module, trainer = Model(), L.Trainer(**_flags(case), strategy=strategy)
        trainer.fit(module)
        numbers: dict[str, Any] = {
            "metrics": dict(trainer.callback_metrics),
            "bar": dict(sorted(trainer.progress_bar_metrics.items())),
        }
        exact: dict[str, Any] = {
            "done": (trainer.global_step, trainer.current_epoch, trainer.should_stop),
            "batches": (trainer.num_training_batches, trainer.num_val_batches, trainer.num_sanity_val_batches),
        }
        numbers["evaluated"] = [trainer.validate(module, verbose=False), trainer.test(module, verbose=False)]
        numbers["predicted"] = trainer.predict(module) or []
        numbers["norms"] = module.grad_norms
        numbers["weights"] = module.state_dict()
        numbers["rates"] = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        saved = {str(path): torch.load(path, weights_only=False) for path in sorted(Path().rglob("*.ckpt"))}
        numbers["saved"] = {path: dict(checkpoint["state_dict"]) for path, checkpoint in saved.items()}
        numbers["logged"] = {str(path): _rows(path) for path in Path().rglob("metrics.csv")}
        own, actions = type(trainer.strategy).__name__, getattr(trainer.profiler, "recorded_durations", ())
        exact |= {
            "calls": module.calls,
            "files": {path: [(k, type(v)) for k, v in found.items() if k != RUN] for path, found in saved.items()},
            "settings": (torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()),
            "actions": {action.replace(own, "Strategy") for action in actions},
        }
    torch.use_deterministic_algorithms(False)
    return {"numbers": numbers, "exact": exact}


def _rows(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{name: float(value or "nan") for name, value in row.items()} for row in csv.DictReader(file)]


def _run_all(cases: list[str]) -> dict[str, dict[str, dict[str, Any] | str]]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results: dict[str, dict[str, dict[str, Any] | str]] = {}
    for case in cases:
        results[case] = {}
        for strategy in ("auto", "3d"):
            run = partial(_run, case, strategy, Path(case, strategy))
            try:
                with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
                    warnings.simplefilter("ignore")
                    results[case][strategy] = run()
            except Exception as error:
                results[case][strategy] = f"{type(error).__name__}: {error}"
    return results


@pytest.fixture(scope="module")
def outcomes(workers: WorkerPools) -> dict[str, dict[str, dict[str, Any] | str]]:
    return workers(1).run(_run_all, list(CASES), timeout=400)[0]


@pytest.mark.parametrize("case", CASES)
def test_flag(case: str, outcomes: dict[str, dict[str, dict[str, Any] | str]]) -> None:
    plain, ours = outcomes[case]["auto"], outcomes[case]["3d"]
    assert isinstance(plain, dict), plain
    assert isinstance(ours, dict), ours
    assert ours["exact"] == plain["exact"]
    tolerance = 1e-6 if case in SUMMED_OTHERWISE else 0
    for name, expected in plain["numbers"].items():
        torch.testing.assert_close(ours["numbers"][name], expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_every_flag_has_a_case() -> None:
    named = {case.partition("-")[0] for case in CASES} | {"strategy", "logger"}
    assert set(inspect.signature(L.Trainer.__init__).parameters) - {"self"} <= named
