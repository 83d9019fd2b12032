"""Tensor parallel together with pipeline schedules, ZeRO stages, clipping, frozen weights and adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.test_tensor_architectures import TABLE
from tests.workers import WorkerPools


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank update."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.up(self.down(x))
        return output


class AdaptedGPT(TinyGPT):
    """LoRA on all projections; norms are trained, the first block and the embeddings are frozen."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        for block in self.blocks:
            assert isinstance(block, Block)
            for name in ("q", "k", "v", "out"):
                setattr(block.attention, name, Adapter(getattr(block.attention, name)))
            block.mlp[0], block.mlp[2] = Adapter(block.mlp[0]), Adapter(block.mlp[2])
        self.blocks[0].requires_grad_(False)
        self.tokens.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-2, eps=1e-3)


def _clipped(name: str) -> Job:
    return replace(TABLE[name].job, gradient_clip_val=0.5, global_batch_size=8)


JOBS = {
    "gpt2": _clipped("gpt2"),
    "llama-one-kv-head": _clipped("llama-one-kv-head"),
    "phi3": _clipped("phi3"),
    "t5": _clipped("t5"),
    "adapters": Job(model=AdaptedGPT, gradient_clip_val=0.1),
}
PP2_TP2 = Layout(pp=2, tp=2, num_microbatches=2)
DP2_TP2 = Layout(dp=2, tp=2)
ZBV_STAGES = ("model.model.layers.0", "model.model.layers.1", "model.lm_head")
CASES = [
    *(("gpt2", replace(DP2_TP2, zero=stage)) for stage in (0, 1, 2, 3)),
    ("gpt2", PP2_TP2),
    ("gpt2", replace(PP2_TP2, schedule="gpipe")),
    ("gpt2", replace(PP2_TP2, dp=2, zero=3)),
    ("llama-one-kv-head", replace(PP2_TP2, schedule="zbv", partition=ZBV_STAGES)),
    ("llama-one-kv-head", replace(DP2_TP2, zero=3, sequence_parallel=True)),
    ("phi3", replace(PP2_TP2, dp=2, zero=2)),
    ("t5", replace(PP2_TP2, zero=1)),
    ("adapters", replace(DP2_TP2, zero=3)),
    ("adapters", replace(PP2_TP2, schedule="interleaved_zero_bubble")),
    ("adapters", replace(PP2_TP2, dp=2, zero=2, schedule="interleaved")),
]


def _is_in_matrix(name: str, layout: Layout) -> bool:
    if name == "gpt2":
        return layout != PP2_TP2
    return name == "adapters" and layout.pp > 1


@pytest.mark.parametrize(
    ("name", "layout"), some_in_matrix(CASES, _is_in_matrix), ids=[f"{name}-{layout}" for name, layout in CASES]
)
def test_layout_equals_one_process(workers: WorkerPools, name: str, layout: Layout) -> None:
    job = JOBS[name]
    result = run_layout(workers, job, layout)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    shares = [b.tensor.sharded_share for b in result.plan.blocks if b.tensor is not None and b.tensor.is_sharded]
    assert len(shares) >= 2
    assert max(shares) >= 0.8
