"""Outputs of blocks that nothing reads stay on shards; a step that reads them after all sees their values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.law.models.blocks import TellingBlock
from tests.models import TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools


class Telling(TinyGPT):
    """It never reads them."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(TellingBlock(32, 4) for _ in range(2))

    def outputs(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        every = []
        for block in self.blocks:
            x, weights = block(x)
            every.append(weights)
        return self.head(self.norm(x)), every

    def forward(self, tokens: Tensor) -> Tensor:
        return self.outputs(tokens)[0]


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (Telling, Layout(tp=2)),
        (Telling, Layout(tp=2, sequence_parallel=True)),
    ],
    ids=str,
)
def test_what_nothing_reads_is_not_gathered(workers: WorkerPools, model: type[Telling], layout: Layout) -> None:
    job = Job(model=model)
    result = run_layout(workers, job, layout)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    for plan in (block.tensor for block in result.plan.blocks if block.kind == TellingBlock.__name__):
        assert plan is not None
        assert plan.unread == {1}
        num_reduces = plan.num_all_reduces_forward + plan.num_all_reduces_backward
        assert plan.is_sequence_parallel or num_reduces == 4
        assert plan.num_other_collectives_forward == (5 if plan.is_sequence_parallel else 0)
