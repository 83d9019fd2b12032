"""What each ZeRO stage communicates in a step, which tells when it gathers parameters and reduces gradients."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models import TinyGPT, loader, tokens
from tests.parity import Layout
from tests.workers import WorkerPools

NUM_MICROBATCHES = 4
NAMES = {"_allgather_base_": "gather", "_reduce_scatter_base_": "scatter", "allreduce_": "reduce"}


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func.overloadpacket.__name__ in NAMES:
            self.counts[NAMES[func.overloadpacket.__name__]] += 1
        return func(*args, **(kwargs or {}))


class _CountSecondStep(L.Callback):
    def __init__(self) -> None:
        self.counting = _Counting()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.counting.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.counting.__exit__(None, None, None)


def _count(layout: Layout) -> Counter[str]:
    count = _CountSecondStep()
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
    trainer.fit(TinyGPT(tied=False), loader(tokens(32), global_batch_size=16, data_parallel_size=layout.dp))
    return count.counting.counts


@pytest.mark.parametrize("pp", [1, 2])
def test_stages_gather_and_reduce_when_they_say(workers: WorkerPools, pp: int) -> None:
    def count(stage: Any) -> Counter[str]:
        microbatches = NUM_MICROBATCHES if pp > 1 else "auto"
        layout = Layout(pp=pp, dp=2, zero=stage, num_microbatches=microbatches)  # type: ignore[arg-type]
        return workers(2 * pp).run(_count, layout)[0]

    counts = {stage: count(stage) for stage in (0, 1, 2, 3)}
    num_microbatches = NUM_MICROBATCHES if pp > 1 else 1
    units = counts[1]["scatter"]
    assert units >= 3, "a unit per block"
    assert counts[0]["scatter"] == 0, "stage 0 replicates"
    assert counts[0]["reduce"] >= units, "and reduces gradients by all-reduce"
    assert counts[1]["gather"] == units, "stage 1 gathers parameters once"
    assert counts[2]["gather"] == units, "stage 2 too"
    assert counts[2]["scatter"] == units * num_microbatches, "but reduces gradients as they come"
    assert counts[3]["scatter"] == units * num_microbatches, "stage 3 reduces as they come"
    assert counts[3]["gather"] >= 2 * (units - 1) * num_microbatches, "and gathers again for every backward"
