"""What the law on the device does not show: compiled code, precisions, memory, and where steps wait for the device.

    make test-gpu                 a GPU if there is one
    make test-gpu DEVICE=accel    the second device

Ranks share a GPU where there are fewer. A row that the device can't run is skipped and says why.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist

from benchmarks.measured_memory import MeasuredPeak
from tests.gpu import DEVICE
from tests.models import LogsLoss, TinyGPT
from tests.parity import Job, Layout, assert_parity, fitted, run_layout
from tests.second_device import device
from tests.second_device.host_reads import place
from tests.second_device.ranks import RanksOf

pytestmark = pytest.mark.gpu

Figure = Callable[[str, str], None]

TOLERANCE = {device.NAME: 1e-5}.get(DEVICE, 1e-3)
"""The second device computes by the CPU's kernels; GPUs add in another order."""

on_a_gpu = partial(pytest.mark.skipif, DEVICE == device.NAME)
"""Mark of what the second device can't run."""


LAYOUTS = {
    "one rank": Layout(),
    "ZeRO 0": Layout(dp=2, zero=0),
    "ZeRO 1": Layout(dp=2),
    "ZeRO 2": Layout(dp=2, zero=2),
    "ZeRO 3": Layout(dp=2, zero=3),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
}
SETTINGS = {
    "activations offloaded": Layout(activations={"offload": True}),
    "compiled by inductor": Layout(compile_backend="inductor"),
    "compiled by inductor, ZeRO 3": Layout(dp=2, zero=3, compile_backend="inductor"),
    "compiled by inductor, tp 2": Layout(tp=2, compile_backend="inductor"),
}
"""Those that the law does not have."""


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(ranks: RanksOf, figure: Figure, name: str) -> None:
    layout = SETTINGS[name]
    if layout.compile_backend == "inductor" and DEVICE == device.NAME:
        pytest.skip("left for a GPU: inductor generates no code for the second device")
    job = Job()
    assert_parity(job, run_layout(ranks, replace(job, accelerator=DEVICE), layout), TOLERANCE)
    figure(f"parity, {name}", f"within {TOLERANCE}")


def _trained(layout: Layout, precision: str) -> tuple[float, str]:
    trainer, _ = fitted(layout, TinyGPT, accelerator=DEVICE, precision=precision)
    return float(trainer.callback_metrics["loss_step"]), dist.get_backend()


@pytest.mark.parametrize("name", ["one rank", "ZeRO 3", "tp 2", "pp 2"])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_precisions(ranks: RanksOf, figure: Figure, precision: str, name: str) -> None:
    if precision == "16-mixed" and DEVICE == device.NAME:
        pytest.skip("left for a GPU: Lightning scales the losses of fp16 on CUDA alone")
    expected = float(fitted(None, TinyGPT)[0].callback_metrics["loss_step"])
    layout = LAYOUTS[name]
    ((loss, backend), *_) = ranks(layout.world_size).run(_trained, layout, precision)
    assert {"cuda": "nccl"}.get(DEVICE, DEVICE) in backend
    assert loss == pytest.approx(expected, abs=0.1)
    figure(f"loss in {precision}, {name}, by {backend}", f"{loss:.4f}, {expected:.4f} on the CPU in fp32")


def _memory() -> tuple[int, int]:
    measured = MeasuredPeak()
    trainer, _ = fitted(
        Layout(activations={"recompute": "none", "budget": 10.0}),
        partial(TinyGPT, width=256, num_layers=8),
        callbacks=[measured],
        accelerator=DEVICE,
    )
    (row,) = trainer.strategy.plan.memory  # type: ignore[attr-defined]
    return row.peak, measured.peak


@on_a_gpu(reason="left for a GPU: the second device has no statistics of an allocator")
def test_memory_against_prediction(ranks: RanksOf, figure: Figure) -> None:
    ((predicted, measured),) = ranks(1).run(_memory)
    figure("peak of a step", f"{measured / 2**20:.1f} MiB, {predicted / measured - 1:+.1%} predicted")
    assert abs(predicted / measured - 1) < 0.15


OVERFLOW, SHARES = "precision/loss_scaling.py:unscale", "pipeline/denominators.py:read"
"""Where a step waits: whether fp16 overflowed, and the shares of a pipeline's microbatches in the valid labels."""


class _Waits(L.Callback):
    """Counts what makes the host wait for the device in two steps after the first ones, by what called it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._caught = warnings.catch_warnings()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 4:
            self._caught.__enter__()
            warnings.simplefilter("always")
            warnings.showwarning = self._note  # type: ignore[assignment]
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        if rest[-1] == 5:
            torch.cuda.set_sync_debug_mode("default")
            self._caught.__exit__(None, None, None)

    def _note(self, message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            self.counts[place() or "elsewhere"] += 1


def _waits(layout: Layout, precision: Any) -> Counter[str]:
    waits = _Waits()
    fitted(layout, LogsLoss, callbacks=[waits], batches=8, epochs=1, accelerator=DEVICE, precision=precision)
    return waits.counts


@on_a_gpu(reason="left for a GPU: test_second_device counts them on the second device")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_do_not_wait_for_the_device(ranks: RanksOf, figure: Figure, name: str, precision: str) -> None:
    layout = LAYOUTS[name]
    counted = ranks(layout.world_size).run(_waits, layout, precision)
    places = {where for counts in counted for where in counts}
    assert places <= {SHARES, *([OVERFLOW] if precision == "16-mixed" else [])}
    assert all(number <= 2 for counts in counted for number in counts.values()), "once in each of two steps"
    shown = "; ".join(", ".join(f"{where} {number / 2:g}" for where, number in counts.items()) for counts in counted)
    figure(f"waits of a step, {name}, {precision}", shown)
