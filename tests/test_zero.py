"""How much each ZeRO stage communicates in a step, against theory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import TinyGPT, loader, tokens
from tests.parity import Job, Layout, run_layout, run_reference
from tests.workers import WorkerPools

NUM_MICROBATCHES = 4
UNSEEN = {"show_gradients": False}
SENT = {"allreduce_": 2, "_allgather_base_": 1, "_reduce_scatter_base_": 1, "alltoall_base_": 1}
"""Collective -> how often its full tensor goes over the wire, but for the share of one rank."""


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "c10d" and name in SENT:
            tensors = args[0] if isinstance(args[0], list) else [args[0]]
            inputs = args[1] if isinstance(args[1], list) else [args[1]]
            full = max(_bytes(tensors), _bytes(inputs))
            self.num_bytes += SENT[name] * full
        return func(*args, **(kwargs or {}))


def _bytes(tensors: list[Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


class _CountSecondStep(L.Callback):
    def __init__(self) -> None:
        self.counting = _Counting()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.counting.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.counting.__exit__(None, None, None)


def _sent(layout: Layout) -> tuple[float, Tensor]:
    """What a step communicates over the data-parallel ranks, in multiples of the parameters of this rank's stage; and
    what some weight is after two.
    """
    count = _CountSecondStep()
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=layout.world_size,
        strategy=layout.strategy(),
        max_steps=2,
        callbacks=[count],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = TinyGPT(tied=False)
    trainer.fit(model, loader(tokens(32), global_batch_size=16, data_parallel_size=layout.dp))
    full = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    norm = next((p for fqn, p in model.named_parameters() if "attention.out.weight" in fqn and not p.is_meta), None)
    return count.counting.num_bytes / (4 * full), torch.empty(0) if norm is None else norm.detach().clone()


@pytest.mark.parametrize(("stage", "theory"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_a_step_sends_what_theory_says(workers: WorkerPools, stage: Literal[0, 1, 2, 3], theory: int) -> None:
    (sent, _), _ = workers(2).run(_sent, Layout(dp=2, zero=stage, zero_settings=UNSEEN))
    least = theory - 0.2 if stage == 3 else theory  # what belongs to no block is gathered once
    assert least <= sent <= theory * 1.03


@pytest.mark.parametrize(("reshards", "theory"), [("auto", 2), (True, 3 * NUM_MICROBATCHES)])
def test_with_a_pipeline_stage_3_gathers_and_reduces_once(
    workers: WorkerPools, reshards: bool | Literal["auto"], theory: int
) -> None:
    settings = {"reshard_after_forward": reshards}
    layout = Layout(pp=2, dp=2, zero=3, num_microbatches=NUM_MICROBATCHES, zero_settings=settings)
    for sent, _ in workers(4).run(_sent, layout):
        assert theory * 0.98 <= sent <= theory * 1.03


@pytest.mark.parametrize(("settings", "theory"), [({"reshard_after_forward": False}, 2), ({"prefetch": 2}, 3)])
def test_stage_3_gathers_as_often_as_set(workers: WorkerPools, settings: dict[str, Any], theory: int) -> None:
    (sent, _), _ = workers(2).run(_sent, Layout(dp=2, zero=3, zero_settings=settings))
    assert theory - 0.2 <= sent <= theory * 1.03


@pytest.mark.parametrize(("stage", "theory"), [(0, 2), (1, 2), (2, NUM_MICROBATCHES + 1)])
def test_with_a_pipeline_stage_2_reduces_every_microbatch(
    workers: WorkerPools, stage: Literal[0, 1, 2], theory: int
) -> None:
    layout = Layout(pp=2, dp=2, zero=stage, num_microbatches=NUM_MICROBATCHES, zero_settings=UNSEEN)
    for sent, _ in workers(4).run(_sent, layout):
        assert theory <= sent <= theory * 1.05


@pytest.mark.parametrize(("stage", "theory"), [(0, 1.0), (1, 1.5), (2, 1.5), (3, 2.5)])
def test_gradients_travel_in_another_dtype(workers: WorkerPools, stage: Literal[0, 1, 2, 3], theory: float) -> None:
    layout = Layout(dp=2, zero=stage, zero_settings=UNSEEN)
    (_, exact), _ = workers(2).run(_sent, layout)
    for dtype in ("bfloat16", "float16"):
        (sent, rounded), _ = workers(2).run(
            _sent, replace(layout, zero_settings={**UNSEEN, "communication_dtype": dtype})
        )
        assert theory - (0.2 if stage == 3 else 0) <= sent <= theory * 1.03
        if stage < 3:
            assert not torch.equal(exact, rounded)
            torch.testing.assert_close(exact, rounded, atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2, dp=2), pytest.param(Layout(pp=2, dp=2, zero=2), marks=pytest.mark.matrix), Layout(dp=2, tp=2)],
    ids=str,
)
def test_gradients_travel_in_bfloat16_in_every_layout(workers: WorkerPools, layout: Layout) -> None:
    job = Job(sees_gradients=False)
    reference = run_reference(job)
    rounded = replace(layout, zero_settings={"communication_dtype": "bfloat16", "bucket_size": 0.01})
    weights = run_layout(workers, job, rounded).weights
    differences = [float((weights[fqn] - value).abs().max()) for fqn, value in reference.weights.items()]
    assert 1e-5 < max(differences) < 2e-3
