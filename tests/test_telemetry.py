"""`Telemetry`: what it tells is what was so, and the run is what it is without it."""

from __future__ import annotations

import csv
import io
import json
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import PyTorchProfiler
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d import ConfigError, StepError
from lightning_3d.callbacks import Report, ScheduleTimeline, Telemetry
from lightning_3d.callbacks import telemetry as telemetry_file
from lightning_3d.callbacks.drawing import peaks_figure, speed_figure, times_figure
from lightning_3d.callbacks.peaks import peak_tflops
from lightning_3d.planning.timing import Span, bubble
from tests.models import TinyGPT, TinyMLP, features, tokens
from tests.parity import Layout, NormRecorder, fitted
from tests.workers import WorkerPools


class GPT(TinyGPT):
    """Returns more than numbers, so that a pipeline runs its head on the whole batch, too."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "labels": batch[1].tolist()}


class Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


STEPS, EVERY = 8, 3
SETTINGS: dict[str, Any] = {"batches": 2 * STEPS, "epochs": 1, "limit_val_batches": 1, "accumulate_grad_batches": 2}

CASES: dict[str, tuple[Layout, type[L.LightningModule], set[str]]] = {
    "one": (Layout(), GPT, set()),
    "pp": (Layout(pp=2, num_microbatches=2), GPT, {"communication_pp", "bubble"}),
    "recomputed": (
        Layout(dp=2, zero=3, activations={"recompute": "full"}),
        GPT,
        {"communication_dp"},
    ),
    "inline": (Layout(pp=2, mode="inline"), TinyMLP, {"communication_pp"}),
}


def _run(case: str, folder: str) -> dict[str, Any]:
    layout, model, _ = CASES[case]
    data = tokens if model is GPT else features
    telemetry = Telemetry(EVERY, peak_tflops=0.5, csv=f"{folder}/rows.csv", trace=f"{folder}/traces")
    without, with_it, screen = Losses(), Losses(), io.StringIO()
    fitted(layout, model, data=data, callbacks=[without], **SETTINGS)
    logger = CSVLogger(folder, flush_logs_every_n_steps=1)
    callbacks = [with_it, Report(f"{folder}/report.html"), telemetry]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry_file, "Console", lambda: Console(file=screen, force_terminal=True))
        fitted(layout, model, data=data, callbacks=callbacks, **SETTINGS, logger=logger)
    measured = {"rows": telemetry.rows, "ranks": telemetry.ranks, "screen": screen.getvalue()}
    return {"metrics": telemetry.metrics, "losses": (without.losses, with_it.losses), **measured}


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def _flops_of_step(model: L.LightningModule, data: Dataset[Any]) -> int:
    """Those of the two batches of a step of one process."""
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    batch = tuple(torch.stack(leaves) for leaves in zip(*(data[i] for i in range(8)), strict=True))
    with FlopCounterMode(display=False) as counter:
        output = model.training_step(batch, 0)
        (output["loss"] if isinstance(output, dict) else output).backward()
    return 2 * counter.get_total_flops()


@pytest.mark.parametrize("case", CASES)
def test_rows_tell_what_was_so_and_change_nothing(workers: WorkerPools, tmp_path: Path, case: str) -> None:
    layout, model, parts = CASES[case]
    outcomes = workers(layout.world_size).run(_run, case, str(tmp_path))
    metrics = outcomes[0]["metrics"]
    for outcome in outcomes:
        assert outcome["losses"][0] == outcome["losses"][1]
        assert outcome["metrics"] == metrics

    phases = {"data", "forward", "backward", "optimizer", "other"} | parts
    times = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    assert times.keys() == phases | {"step"}
    assert sum(times[phase] for phase in phases) == pytest.approx(times["step"], rel=1e-9)
    assert all(times[phase] > 0 for phase in phases)
    assert metrics["samples_per_second"] * metrics["seconds_per_step"] == pytest.approx(16)
    assert ("tokens_per_second" in metrics) == (model is GPT)
    if model is GPT:
        assert metrics["tokens_per_second"] * metrics["seconds_per_step"] == pytest.approx(16 * 16)
    flops = metrics["tflops_per_device"] * 1e12 * layout.world_size * metrics["seconds_per_step"]
    assert flops == pytest.approx(_flops_of_step(model(), (tokens if model is GPT else features)(8)), rel=1e-9)
    assert metrics["mfu"] == pytest.approx(metrics["tflops_per_device"] / 0.5)
    fitted(None, model, data=tokens if model is GPT else features, callbacks=[norms := NormRecorder()], **SETTINGS)
    assert metrics["gradient_norm"] == pytest.approx(norms.gradient_norms[5], rel=1e-4)
    assert "loss_scale" not in metrics
    assert all(f"step {step}" in outcomes[0]["screen"] for step in (3, 6))
    assert 2**20 < metrics["memory/host"] <= metrics["memory/host_peak"] + 2**20

    rows = _rows(tmp_path / "rows.csv")
    assert [row["step"] for row in rows] == ["3", "6"]
    assert all(float(row[f"memory/host_peak/rank{i}"]) > 2**20 for row in rows for i in range(layout.world_size))
    assert float(rows[-1]["time/forward"]) == times["forward"]
    logged = _rows(next(tmp_path.glob("lightning_logs/*/metrics.csv")))
    assert [float(row["time/step"]) for row in logged if row["time/step"]] == [float(r["time/step"]) for r in rows]

    page = (tmp_path / "report.html").read_text()
    assert all(f"<h2>{heading}</h2>" in page for heading in ("Speed", "Time of a step", "Measured memory"))
    assert f"{metrics['samples_per_second']:,.4g}" in page
    _assert_drawn(outcomes[0]["rows"], outcomes[0]["ranks"], rows)

    for rank in range(layout.world_size):
        events = json.loads((tmp_path / "traces" / f"rank{rank}.json").read_text())["traceEvents"]
        names = {event["name"] for event in events if "name" in event}
        blocks = [f"blocks.{i}" for i in range(4)] if model is GPT else [f"layers.{i}" for i in range(6)]
        own = {name for name in blocks if name in names}
        assert own if layout.pp > 1 else own == set(blocks)
        stages = {f"stage {rank} {kind} {i}" for kind in ("forward", "backward") for i in range(2)}
        assert (stages <= names) == (case == "pp")


def _assert_drawn(rows: list[dict[str, float]], ranks: list[dict[str, float]], written: list[dict[str, str]]) -> None:
    """The pictures of a report have the numbers of the file."""
    name = "tokens_per_second" if "tokens_per_second" in rows[0] else "samples_per_second"
    (line,) = speed_figure(rows).axes[0].lines
    assert [*zip(*line.get_data(), strict=True)] == [(int(row["step"]), float(row[name])) for row in written]
    bars = times_figure(ranks, len(rows)).axes[0].patches
    mean = sum(bar.get_height() for bar in bars) / len(ranks)
    assert mean == pytest.approx(1e3 * sum(float(row["time/step"]) for row in written) / len(written))
    axes = peaks_figure(ranks).axes[0]
    unit = {"MiB": 2**20, "GiB": 2**30}[axes.get_ylabel()]
    peaks = [float(written[-1][f"memory/host_peak/rank{i}"]) for i in range(len(ranks))]
    assert [bar.get_height() * unit for bar in axes.patches] == pytest.approx(peaks)


class Sleeps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return x


class SleepyData(Dataset[Any]):
    def __init__(self, num_samples: int) -> None:
        self._data = features(num_samples)

    def __len__(self) -> int:
        return len(self._data)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return self._data[index]


class Sleepy(TinyMLP):
    """Its last block takes 30 ms for a microbatch, and its optimizer 40 ms."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 4), Sleeps()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: time.sleep(0.04))
        return optimizer


class Clock(L.Callback):
    ends: list[float]

    def on_train_start(self, *_: Any) -> None:
        self.ends = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.perf_counter())


def _sleep() -> tuple[dict[str, float], float]:
    telemetry, clock = Telemetry(5, tokens=lambda batch: 3 * len(batch[0])), Clock()
    layout = Layout(pp=2, num_microbatches=4, precision={"loss_scale": 64})
    fit: dict[str, Any] = {"batches": 5, "epochs": 1, "limit_val_batches": 0, "precision": "16-true"}
    fitted(layout, Sleepy, data=SleepyData, callbacks=[clock, telemetry], **fit)
    return telemetry.metrics, clock.ends[-1] - clock.ends[-2]


def test_time_is_told_where_it_goes(workers: WorkerPools) -> None:
    metrics, seconds = workers(2).run(_sleep)[0]
    assert metrics["tokens_per_second"] == pytest.approx(3 * metrics["samples_per_second"])
    assert metrics["loss_scale"] == 64
    assert metrics["time/data"] >= 0.04  # 8 samples
    assert 0.06 <= metrics["time/forward"] < metrics["time/step"] - 0.12  # 4 microbatches, a mean of two ranks
    assert metrics["time/optimizer"] >= 0.04
    assert metrics["time/bubble"] >= 0.05  # one rank waits for most of the forwards of the other
    assert metrics["time/step"] <= seconds < metrics["time/step"] + 0.15


def test_what_waits_for_computations_is_a_bubble() -> None:
    def span(kind: Any, stage: int, start: float, end: float) -> Span:
        return Span(kind=kind, stage=stage, microbatch=0, start=start, end=end)

    first = [span("forward", 0, 0.0, 1.0), span("backward", 0, 5.0, 7.0)]
    second = [span("forward", 1, 1.5, 2.5), span("backward", 1, 2.5, 4.5)]  # both receive for half a second
    assert bubble([first, second], 0) == pytest.approx(3.5)
    assert bubble([first, second], 1) == pytest.approx(1.0 + 2.5)


def test_peaks_are_those_of_dense_products() -> None:
    assert peak_tflops("NVIDIA H100 80GB HBM3", torch.bfloat16, "highest") == 989.4
    assert peak_tflops("NVIDIA H100 PCIe", torch.float16, "highest") == 756
    assert peak_tflops("NVIDIA A100-SXM4-80GB", torch.float32, "high") == 156
    assert peak_tflops("NVIDIA A100-SXM4-80GB", torch.float32, "highest") == 19.5
    assert peak_tflops("NVIDIA GB200", torch.bfloat16, "highest") == 2500
    assert peak_tflops("NVIDIA RTX A1000", torch.bfloat16, "highest") is None
    assert peak_tflops("NVIDIA H100 80GB HBM3", torch.float64, "highest") is None


@pytest.mark.parametrize("settings", [{"every_n_steps": 0}, {"peak_tflops": 0.0}])
def test_values_are_checked(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(settings))}=.* must be"):
        Telemetry(**settings)


def _refusals() -> None:
    fit: dict[str, Any] = {"data": features, "batches": 1, "epochs": 1, "limit_val_batches": 0}
    with pytest.raises(StepError, match="strategy='3d'"):
        fitted(None, TinyMLP, callbacks=[Telemetry()], **fit)
    with pytest.raises(ConfigError, match="ScheduleTimeline"):
        fitted(Layout(), TinyMLP, callbacks=[Telemetry(), _Timeline()], **fit)
    with pytest.raises(ConfigError, match="PyTorchProfiler"):
        fitted(Layout(), TinyMLP, callbacks=[Telemetry(trace="traces")], profiler=_Profiler(), **fit)


def test_others_that_measure_the_same_are_refused(workers: WorkerPools) -> None:
    workers(1).run(_refusals)


class _Timeline(ScheduleTimeline):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None: ...


class _Profiler(PyTorchProfiler):
    def __del__(self) -> None:
        """Lightning's fails where no action has begun."""
