"""Training on a device that is no CPU: everything lies where it should, and the numbers are those of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import MeanMetric

from lightning_3d import ThreeDPrecision, ThreeDStrategy
from lightning_3d.activations.offload import Offload
from lightning_3d.activations.transfers import SideStreams
from lightning_3d.callbacks import Telemetry
from lightning_3d.zero.offload import steps
from lightning_3d.zero.offload.copies import Lent
from lightning_3d.zero.offload.windows import Part, deal
from tests.models import LogsLoss, TinyGPT, loader, tokens
from tests.optimizers import ByHand, Lars
from tests.parity import QUIET, Job, Layout, assert_parity, fitted, run_layout, whole_state
from tests.second_device import build, device
from tests.second_device.host_reads import StepReads
from tests.second_device.ranks import RanksOf, ranks_of
from tests.workers import WorkerPools

pytestmark = pytest.mark.skipif(
    build.compiler() is None, reason=f"the device is built by {build.COMPILER}, which is missing"
)


@pytest.fixture(scope="module")
def ranks(workers: WorkerPools) -> Iterator[RanksOf]:
    with ranks_of(device.NAME, workers) as ranks:
        yield ranks


class ComputesOnData(TinyGPT):
    """Changes its inputs by a buffer and by a tensor where its parameters are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(1, dtype=torch.int64))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        nothing = torch.zeros(1, dtype=inputs.dtype, device=next(self.parameters()).device)
        return super().training_step((inputs + self.shift + nothing, targets), batch_idx)


JOB = Job(model=ComputesOnData, accelerator=device.NAME)
LAYOUTS = {"dp2": Layout(dp=2), "zero3": Layout(dp=2, zero=3), "pp2": Layout(pp=2), "tp2": Layout(tp=2)}


@pytest.mark.parametrize("name", ["zero3", "pp2", "tp2"])
def test_parity(ranks: RanksOf, name: str) -> None:
    assert_parity(JOB, run_layout(ranks, JOB, LAYOUTS[name]))


class _BytesPlaced(L.Callback):
    """Counts what is on the device when training starts, and what was at most until then."""

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.kept = self.peak = self.of_block = 0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.of_block = sum(p.nbytes for p in pl_module.get_submodule("blocks.0").parameters())
        self.before = self.library.allocated_bytes()
        self.library.reset_peak()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.kept = self.library.allocated_bytes() - self.before
        self.peak = self.library.peak_bytes() - self.before


def _bytes_placed(layout: Layout) -> tuple[int, int, int]:
    counted = _BytesPlaced(device.library())
    model = partial(TinyGPT, width=128, num_layers=6)
    fitted(layout, model, callbacks=[counted], batches=1, epochs=1, accelerator=device.NAME)
    return counted.kept, counted.peak, counted.of_block


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), Layout(tp=2, verify=False)], ids=["zero3", "tp2"])
def test_no_more_is_placed_than_is_kept_and_one_block(ranks: RanksOf, layout: Layout) -> None:
    for kept, peak, of_block in ranks(2).run(_bytes_placed, layout):
        assert 3 * of_block < kept < 4.5 * of_block, "half of six blocks, and what is around them"
        assert peak <= kept + 1.2 * of_block


class _OnDevice(ByHand):
    """Has no kernel for CPUs."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        assert parameter.device.type == gradient.device.type == device.NAME
        super().update(parameter, gradient, group)


class _SteppedOnDevice(TinyGPT):
    def configure_optimizers(self) -> Optimizer:
        return _OnDevice(self.parameters())


def _kind_on_device() -> str:
    trainer, _ = fitted(Layout(dp=2), _SteppedOnDevice, batches=1, epochs=1, accelerator=device.NAME)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    (planned,) = trainer.strategy.plan.optimizers
    return planned.kind


def test_optimizers_are_tried_where_they_step(ranks: RanksOf) -> None:
    assert ranks(2).run(_kind_on_device) == ["elements", "elements"]


class Predicting(TinyGPT):
    """Predicts logits."""

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits: Tensor = self(batch[0])
        return logits


class _Devices(L.Callback):
    """The devices of batches and of what steps return."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, *_: Any) -> None:
        self.seen |= {str(tensor.device) for tensor in batch}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.add(str(outputs["loss"].device))

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.seen.add(str(outputs.device))


def _where() -> tuple[set[str], list[int]]:
    """The devices that were seen, and the indices on which this rank allocated memory."""
    before = [device.library().num_allocations(index) for index in range(device.NUM_DEVICES)]
    seen, strategy = _Devices(), ThreeDStrategy(pipeline_parallel_size=2, batch={"broadcast": True})
    settings: dict[str, Any] = {**QUIET, "accelerator": device.NAME, "devices": 2, "max_epochs": 1}
    trainer = L.Trainer(strategy=strategy, callbacks=[seen], enable_checkpointing=False, **settings)
    model, data = Predicting(num_layers=2), loader(tokens(8), global_batch_size=8)
    trainer.fit(model, data, data)
    trainer.predict(model, data)
    after = [device.library().num_allocations(index) for index in range(device.NUM_DEVICES)]
    return seen.seen, [index for index, numbers in enumerate(zip(before, after, strict=True)) if len(set(numbers)) > 1]


def test_a_rank_uses_its_own_index_alone(ranks: RanksOf) -> None:
    assert ranks(2).run(_where) == [({f"{device.NAME}:{index}"}, [index]) for index in range(2)]


class UpdatesMetric(LogsLoss):
    """Has a metric that looks at its inputs for numbers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss)
        return loss


class SteppedByOwners(LogsLoss):
    """Each parameter is stepped whole by one rank."""

    def configure_optimizers(self) -> Optimizer:
        return Lars(self.parameters(), lr=0.01)


SHARES = {"to the host: pipeline/denominators.py:read": 1.0}
"""The shares of the microbatches in the valid labels, as the host leaves out those that have none."""
READS: list[tuple[str, type[TinyGPT], str, tuple[dict[str, float], dict[str, float]]]] = [
    ("tp2", LogsLoss, "32-true", ({}, {})),
    ("dp2", SteppedByOwners, "32-true", ({}, {})),
    ("pp2", UpdatesMetric, "32-true", ({}, {**SHARES, "read: pipeline/effects/metrics.py:_on_call": 2.0})),
    ("zero3", LogsLoss, "16-mixed", ({"read: precision/loss_scaling.py:unscale": 1.0},) * 2),
]
"""Layout, model, precision -> where a step makes the host of each rank wait for its device, and how often."""


def _reads(layout: Layout, model: type[TinyGPT], precision: Any) -> dict[str, float]:
    seen = StepReads(first=4, last=5)  # the steps before are traced and studied
    plugins = [ThreeDPrecision(precision)]  # Lightning's flag turns scaling off where there is no CUDA
    fitted(layout, model, callbacks=[seen], batches=8, epochs=1, accelerator=device.NAME, plugins=plugins)
    return seen.by_step()


@pytest.mark.parametrize(("layout", "model", "precision", "expected"), READS)
def test_steps_wait_for_the_device_where_is_known(
    ranks: RanksOf, layout: str, model: type[TinyGPT], precision: str, expected: Any
) -> None:
    assert tuple(ranks(2).run(_reads, LAYOUTS[layout], model, precision)) == expected


def _telemetry(layout: Layout) -> tuple[dict[str, float], dict[str, float]]:
    seen, telemetry = StepReads(first=4, last=5), Telemetry(8)  # those two are not measured, the eighth is
    fitted(layout, LogsLoss, callbacks=[seen, telemetry], batches=8, epochs=1, accelerator=device.NAME)
    return seen.by_step(), telemetry.metrics


@pytest.mark.parametrize(
    ("layout", "parts"), [("pp2", {"bubble", "communication_pp"}), ("zero3", {"communication_dp"})]
)
def test_telemetry_measures_by_events_of_the_device(ranks: RanksOf, layout: str, parts: set[str]) -> None:
    for reads, metrics in ranks(2).run(_telemetry, LAYOUTS[layout]):
        assert reads in ({}, SHARES)
        phases = {"data", "forward", "backward", "optimizer", "other"} | parts
        assert all(metrics[f"time/{phase}"] > 0 for phase in phases)
        assert sum(metrics[f"time/{phase}"] for phase in phases) == pytest.approx(metrics["time/step"], rel=1e-3)
        assert metrics["tflops_per_device"] > 0


def _waits_of_offload(precision: Any, window: float) -> tuple[dict[str, float], int, int]:
    """Other waits in a step than for windows; those for windows in all steps, and windows."""
    settings = {"offload_optimizer": "cpu", "offload_window": window}
    windows: list[Any] = []

    def dealt(*args: Any, **kwargs: Any) -> list[list[Part]]:
        windows.extend(found := deal(*args, **kwargs))
        return found

    with (
        mock.patch.object(Lent, "wait", autospec=True, side_effect=Lent.wait) as waits,
        mock.patch.object(steps, "deal", dealt),
    ):
        reads = _reads(Layout(dp=2, zero_settings=settings), LogsLoss, precision)
    return reads, waits.call_count, len(windows)


def test_offloaded_steps_wait_once_per_window(ranks: RanksOf) -> None:
    for reads, num_waits, num_windows in ranks(2).run(_waits_of_offload, "bf16-true", 0.02):
        assert reads == {}
        assert num_waits == num_windows > 3 * 8, "several in each of 8 steps"


def _with_activations_offloaded(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """States after training without and with, and copies to the host."""
    states, num = [], 0
    for offload in (False, True):
        activations = {**layout.activations, "offload": offload}
        with (
            mock.patch.object(SideStreams, "to_host", autospec=True, side_effect=SideStreams.to_host) as copies,
            mock.patch("lightning_3d.run.parallel.activations.Offload", partial(Offload, least_bytes=1)),
        ):
            settings: dict[str, Any] = {"batches": 2, "epochs": 1, "accelerator": device.NAME}
            trainer, _ = fitted(replace(layout, activations=activations), TinyGPT, **settings)
        states.append({name: value.cpu() for name, value in whole_state(trainer).items()})
        num = copies.call_count - num
    return states[0], states[1], num


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, num_microbatches=4, schedule="zbv"), Layout(tp=2, activations={"recompute": "full"})],
    ids=["zbv", "tp2-recomputed"],
)
def test_offloaded_activations_change_no_bit(ranks: RanksOf, layout: Layout) -> None:
    for without, offloaded, num in ranks(2).run(_with_activations_offloaded, layout):
        assert num > 0
        torch.testing.assert_close(offloaded, without, rtol=0, atol=0)
