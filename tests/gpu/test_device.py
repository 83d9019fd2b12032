"""One device against the CPU: the same code on a GPU and, where there is none, on the second device of the rehearsal.

    make test-gpu                 a GPU if there is one
    make test-gpu DEVICE=accel    the second device

A row that the device can't run is skipped and says why; figures go to ``benchmarks/results/DEVICE.md``.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_3d.callbacks import MemoryTable
from tests.law.models import MODELS as ROWS
from tests.models import TinyGPT
from tests.parity import Job, Layout, assert_parity, fitted, run_layout, run_reference
from tests.second_device import device
from tests.second_device.ranks import RanksOf, ranks_of
from tests.workers import WorkerPools

pytestmark = pytest.mark.gpu

DEVICE = os.environ.get("DEVICE") or ("cuda" if torch.cuda.is_available() else device.NAME)
REPOSITORY = Path(__file__).parents[2]
RESULTS = REPOSITORY / "benchmarks/results" / f"{DEVICE}.md"

MODELS = (
    *("llama", "gpt2", "qwen3", "gemma", "mixtral", "mamba", "bert", "deberta-v2", "t5", "whisper", "wav2vec2", "vit"),
    *("swin", "resnet", "convnext", "segformer", "clip", "unet", "lstm", "mixture"),
)
"""20 architectures of pipelines' table."""

LEFT = {
    "lstm": "torch takes a fused cell there, which CPUs, whose kernels the second device has, lack",
    "mixtral": "transformers counts an expert's tokens otherwise on CPUs, whose kernels the second device has",
    "mixture": "the second device can't resize the result of nonzero",
}
"""Model -> why the second device can't run it."""

TOLERANCE = {device.NAME: 1e-5}.get(DEVICE, 1e-3)
"""The second device computes by the CPU's kernels; GPUs add in another order."""


@pytest.fixture(scope="module")
def ranks(workers: WorkerPools) -> Iterator[Callable[[int], RanksOf]]:
    with ranks_of(DEVICE, workers) as ranks:

        def of(world_size: int) -> RanksOf:
            num_devices = device.NUM_DEVICES if DEVICE == device.NAME else torch.cuda.device_count()
            if world_size > num_devices:
                pytest.skip(f"{world_size} ranks need as many devices: NCCL refuses two on one ({num_devices} here)")
            return ranks(world_size)

        yield of


@pytest.fixture(scope="module")
def figures() -> Iterator[dict[str, str]]:
    """Name -> figure; written down at the end."""
    found: dict[str, str] = {}
    yield found
    name = torch.cuda.get_device_name() if DEVICE == "cuda" else f"the host's memory, {platform.machine()}"
    lines = [f"# {DEVICE}: {name}, torch {torch.__version__}", "", "| what | figure |", "|---|---|"]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join([*lines, *(f"| {what} | {figure} |" for what, figure in found.items()), ""]))


@pytest.mark.parametrize("name", MODELS)
def test_parity_with_the_cpu(ranks: Callable[[int], RanksOf], figures: dict[str, str], name: str) -> None:
    if name in LEFT and DEVICE == device.NAME:
        pytest.skip(f"left for a GPU: {LEFT[name]}")
    job = ROWS[name].job
    reference = run_reference(job)
    start = time.perf_counter()
    result = run_layout(ranks(1), replace(job, accelerator=DEVICE), Layout(num_microbatches=1))
    assert_parity(reference, result, tolerance=TOLERANCE)
    figures[f"parity of {name}"] = f"within {TOLERANCE}, {time.perf_counter() - start:.1f} s"


SETTINGS = {
    "ZeRO 1": Layout(dp=2),
    "ZeRO 3": Layout(dp=2, zero=3),
    "tp 2": Layout(tp=2),
    "pp 2": Layout(pp=2),
    "optimizer offloaded": Layout(zero_settings={"offload_optimizer": "cpu"}),
    "optimizer offloaded, ZeRO 1": Layout(dp=2, zero_settings={"offload_optimizer": "cpu"}),
    "activations offloaded": Layout(activations={"offload": True}),
    "selective": Layout(activations={"recompute": "selective"}),
    "compiled by AOTAutograd": Layout(compile_backend="aot_eager"),
    "compiled by inductor": Layout(compile_backend="inductor"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(ranks: Callable[[int], RanksOf], figures: dict[str, str], name: str) -> None:
    layout = SETTINGS[name]
    if layout.compile_backend == "inductor" and DEVICE == device.NAME:
        pytest.skip("left for a GPU: inductor generates no code for the second device")
    job = Job()
    assert_parity(
        run_reference(job), run_layout(ranks(layout.world_size), replace(job, accelerator=DEVICE), layout), TOLERANCE
    )
    figures[f"parity, {name}"] = f"within {TOLERANCE}"


def _trained(precision: str) -> tuple[float, str]:
    trainer, _ = fitted(Layout(), TinyGPT, accelerator=DEVICE, precision=precision)
    return float(trainer.callback_metrics["loss_step"]), dist.get_backend()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
def test_precisions(ranks: Callable[[int], RanksOf], figures: dict[str, str], precision: str) -> None:
    if precision == "16-mixed" and DEVICE == device.NAME:
        pytest.skip("left for a GPU: Lightning scales the losses of fp16 on CUDA alone")
    expected = float(fitted(None, TinyGPT)[0].callback_metrics["loss_step"])
    ((loss, backend),) = ranks(1).run(_trained, precision)
    assert {"cuda": "nccl"}.get(DEVICE, DEVICE) in backend
    assert loss == pytest.approx(expected, abs=TOLERANCE if precision == "32-true" else 0.1)
    figures[f"loss in {precision}, by {backend}"] = f"{loss:.4f}, {expected:.4f} on the CPU in fp32"


def _memory() -> tuple[int, int]:
    trainer, _ = fitted(
        Layout(activations={"recompute": "none", "budget": 10.0}),
        partial(TinyGPT, width=256, num_layers=8),
        callbacks=[MemoryTable()],
        accelerator=DEVICE,
    )
    (row,) = trainer.strategy.plan.memory  # type: ignore[attr-defined]
    assert row.measured is not None
    return row.peak, row.measured


def test_memory_against_prediction(ranks: Callable[[int], RanksOf], figures: dict[str, str]) -> None:
    if DEVICE == device.NAME:
        pytest.skip("left for a GPU: the second device has no statistics of an allocator")
    ((predicted, measured),) = ranks(1).run(_memory)
    figures["peak of a step"] = f"{measured / 2**20:.1f} MiB, {predicted / measured - 1:+.1%} predicted"
    assert abs(predicted / measured - 1) < 0.15


def test_llama_step(figures: dict[str, str]) -> None:
    if DEVICE == device.NAME:
        pytest.skip("left for a GPU: benchmarks.llama_step takes the time and the memory of one")
    command = [sys.executable, "-m", "benchmarks.llama_step"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    figures["benchmarks.llama_step"] = (
        "<pre>" + run.stdout.strip().replace("\n", "<br>").replace("|", "&#124;") + "</pre>"
    )
