"""Unusual code in and around sharded blocks: it gives one process's numbers, or is refused alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.tensor import BlockTensorPlan
from tests.models import Attention, Block, TinyGPT
from tests.parity import Job, Layout, LayoutRun, assert_parity, run_layout, run_reference
from tests.tables import on_four_ranks, some_in_matrix
from tests.workers import WorkerError, WorkerPools

TP2 = Layout(tp=2)


class Masked(Attention):
    """Its causal mask is an additive float one, with a learned bias if asked."""

    def __init__(self, width: int, num_heads: int, *, is_learned: bool) -> None:
        super().__init__(width, num_heads)
        self.bias = nn.Parameter(torch.randn(16, 16), requires_grad=is_learned)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (projection(x).view(split).transpose(1, 2) for projection in (self.q, self.k, self.v))
        mask = torch.full((length, length), float("-inf"), device=x.device).triu(1) + self.bias[:length, :length]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        output: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return output


class MaskedBlock(Block):
    """With a constant bias."""

    is_learned = False

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.attention = Masked(width, num_heads, is_learned=self.is_learned)


class BiasedBlock(MaskedBlock):
    """With a learned bias, which all heads share."""

    is_learned = True


class CheckpointedBlock(Block):
    """It checkpoints its parts."""

    use_reentrant = False
    only_in_training = False

    def forward(self, x: Tensor) -> Tensor:
        def run(part: nn.Module, y: Tensor) -> Tensor:
            if self.only_in_training and not self.training:
                return part(y)  # type: ignore[no-any-return]
            return checkpoint(part, y, use_reentrant=self.use_reentrant)  # type: ignore[no-any-return]

        x = x + run(self.attention, self.norm1(x))
        return x + run(self.mlp, self.norm2(x))


class CheckpointedInTraining(CheckpointedBlock):
    """Evaluation does not checkpoint."""

    only_in_training = True


class ReentrantInTraining(CheckpointedInTraining):
    """The older kind."""

    use_reentrant = True


class CountingBlock(Block):
    """It sets a buffer's data."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.register_buffer("scale", torch.ones(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = self.mlp[1](self.mlp[0](self.norm2(x)))
        if self.training:
            self.scale.data = 0.9 * self.scale + 0.1 * hidden.detach().abs().mean((0, 1))
        output: Tensor = x + self.mlp[2](hidden / self.scale)
        return output


class ParticularBlock(Block):
    """It takes small numbers alone, which random inputs are not."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.isnan().any().logical_or(x.abs().max() > 2.5):
            raise ValueError("not near 0")
        return super().forward(x)


class GPT(TinyGPT):
    """TinyGPT of one of these blocks."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block(32, 4) for _ in range(2))


class MaskedGPT(GPT):
    block = MaskedBlock


class BiasedGPT(GPT):
    block = BiasedBlock


class CheckpointedGPT(GPT):
    block = CheckpointedBlock


class CheckpointedInTrainingGPT(GPT):
    block = CheckpointedInTraining


class ReentrantInTrainingGPT(GPT):
    block = ReentrantInTraining


class CountingGPT(GPT):
    block = CountingBlock


class Penalized(TinyGPT):
    """Its loss has a penalty on gradients of its MLPs."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        x = self.tokens(inputs).detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        (gradient,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()) + 1000 * gradient.square().sum()
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss


class MLPBlock(nn.Module):
    """Without attention, whose CPU kernel has no second derivative."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return output


class PenalizedGPT(Penalized):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MLPBlock(32, 4) for _ in range(2))


def _plans(result: LayoutRun) -> list[BlockTensorPlan]:
    plans = [block.tensor for block in result.plan.blocks if block.fqn.startswith("blocks.")]
    return [plan for plan in plans if plan is not None]


@pytest.mark.parametrize(
    "model",
    [
        MaskedGPT,
        BiasedGPT,
        CheckpointedGPT,
        CheckpointedInTrainingGPT,
        ReentrantInTrainingGPT,
        CountingGPT,
        PenalizedGPT,
    ],
)
def test_model_equals_one_process(workers: WorkerPools, model: type[TinyGPT]) -> None:
    job = Job(model=model)
    result = run_layout(workers, job, TP2)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    plans = _plans(result)
    assert len(plans) == 2
    assert all(plan.sharded_share > 0.9 for plan in plans), plans


@pytest.mark.parametrize(
    "layout",
    some_in_matrix([TP2, Layout(dp=2, tp=2, zero=2), Layout(pp=2, tp=2, num_microbatches=2)], on_four_ranks),
    ids=str,
)
def test_clipping_by_value_equals_one_process(workers: WorkerPools, layout: Layout) -> None:
    job = Job(gradient_clip_val=0.01, gradient_clip_algorithm="value")
    unclipped = run_reference(Job())
    reference = run_reference(job)
    assert_parity(reference, run_layout(workers, job, layout), tolerance=1e-5)
    assert reference.numbers.losses[2] != unclipped.numbers.losses[2]


class ParticularGPT(GPT):
    block = ParticularBlock

    def __init__(self) -> None:
        super().__init__()
        nn.init.normal_(self.positions.weight, std=0.1)


def test_block_that_rejects_random_inputs_is_left_whole(workers: WorkerPools) -> None:
    job = Job(model=ParticularGPT)
    result = run_layout(workers, job, TP2)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    assert [plan.is_sharded for plan in _plans(result)] == [False, False]
    assert any("not near 0" in text for text in result.warnings)


class SecondOrderLoss(TinyGPT):
    """A gradient of the gradient of the cross entropy."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.norm(self.tokens(batch[0])).detach().requires_grad_()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class HookedParameter(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.norm.weight.register_hook(lambda gradient: 2 * gradient)


class SparseTable(TinyGPT):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.tokens.sparse = True


class SettingWeights(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mlp[0].weight.data = self.mlp[0].weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class SettingGPT(GPT):
    block = SettingWeights


REFUSED: list[tuple[Callable[[], TinyGPT], str]] = [
    (SecondOrderLoss, "gradients of gradients through a cross entropy on sharded logits are not built"),
    (HookedParameter, "norm.weight has gradient hooks, which would be lost"),
    (SparseTable, r"tokens is an Embedding\(sparse=True\)"),
    (SettingGPT, r"parameter.data = ... inside of a block"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[model.__name__ for model, _ in REFUSED])
def test_what_has_no_sharded_form_is_refused_on_all_ranks(
    workers: WorkerPools, model: Callable[[], TinyGPT], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as failed:
        run_layout(workers, Job(model=model), TP2)
    assert failed.value.failures.keys() == {0, 1}
