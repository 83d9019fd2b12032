"""How much each ZeRO stage communicates in a step, against theory."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import TinyGPT
from tests.parity import Layout, fitted
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


def _sent(layout: Layout) -> float:
    """What a step communicates over the data-parallel ranks, in multiples of the parameters of this rank's stage."""
    count = _CountSecondStep()
    data: dict[str, Any] = {"batches": 2, "epochs": 1, "limit_val_batches": 0}
    _, model = fitted(layout, partial(TinyGPT, tied=False), callbacks=[count], **data)
    full = sum(parameter.numel() for parameter in model.parameters() if not parameter.is_meta)
    return count.counting.num_bytes / (4 * full)


PIPELINE = {"pp": 2, "dp": 2, "num_microbatches": NUM_MICROBATCHES}
HALF = {"communication_dtype": "bfloat16"}
VOLUMES: list[tuple[Layout, float]] = [
    (Layout(dp=2, zero=0, zero_settings=UNSEEN), 2.0),
    (Layout(dp=2, zero=2, zero_settings=UNSEEN), 2.0),
    (Layout(dp=2, zero=3, zero_settings={"prefetch": 2}), 3.0),
    (Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": False}), 2.0),
    (Layout(zero=3, **PIPELINE), 2.0),  # type: ignore[arg-type]  # gathers and reduces once
    (Layout(zero=3, zero_settings={"reshard_after_forward": True}, **PIPELINE), 3.0 * NUM_MICROBATCHES),  # type: ignore[arg-type]
    (Layout(zero=1, zero_settings=UNSEEN, **PIPELINE), 2.0),  # type: ignore[arg-type]
    (Layout(zero=2, zero_settings=UNSEEN, **PIPELINE), NUM_MICROBATCHES + 1.0),  # type: ignore[arg-type]
    (Layout(dp=2, zero=0, zero_settings={**UNSEEN, **HALF}), 1.0),
    (Layout(dp=2, zero=2, zero_settings={**UNSEEN, **HALF}), 1.5),
    (Layout(dp=2, zero=3, zero_settings={**UNSEEN, **HALF}), 2.5),
]
"""Layout -> what a step sends."""


@pytest.mark.parametrize(("layout", "theory"), VOLUMES, ids=str)
def test_a_step_sends_what_theory_says(workers: WorkerPools, layout: Layout, theory: float) -> None:
    least = theory - 0.2 if layout.zero == 3 else theory * 0.98  # what belongs to no block is gathered once
    for sent in workers(layout.world_size).run(_sent, layout):
        assert least <= sent <= theory * 1.05
