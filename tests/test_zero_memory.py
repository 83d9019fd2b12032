"""Bytes of parameters, gradients and optimizer states that each rank holds, against ZeRO's formulas."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.models import ADAM_EPS, TinyGPT
from tests.parity import Layout, fitted
from tests.workers import WorkerPools

Stage = Literal[0, 1, 2, 3]


class _Weighing(torch.optim.AdamW):
    """Weighs the gradients that it steps, and those of the whole module."""

    module: L.LightningModule | None = None
    num_bytes = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        stepped = [p.grad for group in self.param_groups for p in group["params"]]
        if self.module is not None:
            self.num_bytes = _num_bytes([*stepped, *(p.grad for p in self.module.parameters())])
        return loss


class _Weighed(TinyGPT):
    def configure_optimizers(self) -> Any:
        optimizer = _Weighing(self.parameters(), eps=ADAM_EPS)
        optimizer.module = self
        return optimizer


def _num_bytes(tensors: Iterable[object]) -> int:
    """Of distinct memory."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    spans = {(t.untyped_storage().data_ptr(), t.storage_offset()): t.nbytes for t in local if t.numel()}
    return sum(spans.values())


def _weigh(layout: Layout, precision: Any) -> dict[str, float]:
    make = partial(_Weighed, num_layers=2, tied=False)
    full = 4 * sum(parameter.numel() for parameter in make().parameters())
    trainer, module = fitted(layout, make, batches=2, epochs=1, precision=precision)
    optimizer = trainer.optimizers[0]
    assert isinstance(optimizer, _Weighing)
    states = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, Tensor) and t.dim()]
    weights = _num_bytes(module.parameters())
    return {"parameters": weights / full, "gradients": optimizer.num_bytes / full, "states": _num_bytes(states) / full}


# Bytes of a number of the parameters, their gradients where optimizers step them, and the states of AdamW.
_BYTES = {"32-true": (4, 4, 8), "bf16-mixed": (4, 4, 8), "bf16-true": (2, 4, 12)}


@pytest.mark.parametrize(
    ("stage", "num_ranks", "precision"),
    [
        *itertools.product([0, 1, 2, 3], [2], ["bf16-true"]),
        (2, 2, "bf16-mixed"),
        (3, 4, "32-true"),
    ],
)
def test_ranks_hold_what_zero_says(workers: WorkerPools, stage: Stage, num_ranks: int, precision: str) -> None:
    share, (parameters, gradients, states) = 1 / num_ranks, _BYTES[precision]
    formula = {
        "parameters": parameters / 4 * (share if stage == 3 else 1),
        "gradients": gradients / 4 * (1 if stage == 0 else share),  # at stage 1 once they are reduced
        "states": states / 4 * (1 if stage == 0 else share),
    }
    for held in workers(num_ranks).run(_weigh, Layout(dp=num_ranks, zero=stage), precision):
        assert held == pytest.approx(formula, rel=0.03)
