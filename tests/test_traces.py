"""A step is traced anew where what its trace depends on has changed, and only there."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.pipeline.traces import Traces
from lightning_3d.trace.traced_numbers import Decisions
from tests.models import TinyMLP, features
from tests.parity import QUIET, whole_state
from tests.workers import WorkerError, WorkerPools

Ids = tuple[Tensor, Tensor, Any]

# ---- numbers


def test_decisions_are_made_again() -> None:
    decisions = Decisions()
    with decisions.noted({"step": 7, "current_epoch": 1, "global_step": 7}) as numbers:
        step = numbers["step"]
        assert (step + 1) % 2 == 0
        assert not 3 - step > 0
        assert 2 * step * 0.5 == 7.0
        assert -step < abs(-step)
        assert [0, 1][bool(step // 100)] == 0
        assert L.LightningModule().global_step == 7
    assert decisions.outcomes({"step": 7, "global_step": 7}) == (True, False, True, False, True)
    assert decisions.outcomes({"step": 108, "global_step": 0}) == (False, False, True, True, False)


# ---- steps


class WithIds(TinyMLP):
    """Weighs samples by their ids, of which the trace needs only how many there are."""

    def training_step(self, batch: Ids, batch_idx: int) -> Tensor:  # type: ignore[override]
        weights = torch.tensor(batch[2]) % 2 + 1
        return (F.mse_loss(self(batch[0]), batch[1], reduction="none").mean(1) * weights).sum()


def _with_ids(rows: list[tuple[Tensor, Tensor]]) -> Ids:
    inputs, targets = zip(*rows, strict=True)
    return torch.stack(inputs), torch.stack(targets), [int(1000 * row[0].abs()) for row in inputs]


def _train(model: type[TinyMLP], pipeline: bool) -> tuple[dict[str, Tensor], list[int]]:
    numbers: list[int] = []
    own, num_traces = Traces._traced, [0]

    def counting(self: Traces, *args: Any) -> Any:
        num_traces[0] += 1
        return own(self, *args)

    class Counts(L.Callback):
        def on_train_epoch_end(self, *_: Any) -> None:
            numbers.append(num_traces[0])

    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        max_epochs=4,
        devices=2 if pipeline else 1,
        strategy=ThreeDStrategy(pipeline_parallel_size=2) if pipeline else "auto",
        callbacks=[Counts()],
        enable_checkpointing=False,
        **QUIET,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Traces, "_traced", counting)
        collate: Any = _with_ids if model is WithIds else None
        batches = DataLoader(features(32), batch_size=8, collate_fn=collate)
        trainer.fit(model(), batches, DataLoader(features(8), batch_size=8))
    return whole_state(trainer), numbers


class ByNumber(TinyMLP):
    """Repeats rows as often as a number says that a hook changes."""

    num_times = 1

    def on_train_epoch_start(self) -> None:
        self.num_times = 1 + self.current_epoch

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        hidden = first(x).repeat(self.num_times, 1).view(self.num_times, len(x), -1).mean(0)
        for layer in rest:
            hidden = layer(hidden)
        return hidden  # type: ignore[no-any-return]


def test_shapes_that_changed_since_the_trace_are_refused(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"it took another path .*: repeat returned a tensor of shape \(8, 32\)"):
        workers(2).run(_train, ByNumber, True)
