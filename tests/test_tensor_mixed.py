"""Tensor parallel together with pipeline schedules, ZeRO stages, clipping, frozen weights and adapters."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.distributed import kept_alike
from lightning_3d.distributed.mesh import is_shard
from lightning_3d.torch_internals.dtensor import part_of
from tests.law.models import MODELS
from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, fitted, run_layout, run_reference
from tests.tables import some_in_matrix
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
    return replace(MODELS[name].job, gradient_clip_val=0.5, global_batch_size=8)


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


class _Noise(L.Callback):
    """Before the third step a rank has other rounding errors in what all ranks of its tensor-parallel group hold."""

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        for parameter in (pl_module.get_parameter("norm.weight"), pl_module.get_parameter("blocks.0.norm1.weight")):
            local = part_of(parameter.detach())
            if dist.get_rank() == 1 and trainer.global_step == 2:
                local *= 1 + torch.finfo(local.dtype).eps


def _whole_weights(layout: Layout, precision: str) -> list[Tensor]:
    with mock.patch.object(kept_alike, "PERIOD", 3):
        _, module = fitted(layout, TinyGPT, callbacks=[_Noise()], batches=3, epochs=1, precision=precision)
    whole = [parameter.detach() for parameter in module.parameters() if not is_shard(parameter, "tp")]
    assert len(whole) > 8
    return [part_of(parameter) for parameter in whole]


@pytest.mark.parametrize(
    ("layout", "precision"),
    [(Layout(tp=2), "32-true"), (Layout(tp=2), "bf16-true"), (Layout(dp=2, tp=2, zero=3), "32-true")],
)
def test_what_is_not_sharded_stays_the_same(workers: WorkerPools, layout: Layout, precision: str) -> None:
    ranks = workers(layout.world_size).run(_whole_weights, layout, precision)
    for first, second in zip(*ranks[:2], strict=True):
        assert torch.equal(first, second)
