"""When gradients are reduced at ZeRO stages 0 to 2: parts that come late, ranks that differ, models that change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.zero.plain_parameters import PlainParameters
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET, Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

Stage = Literal[0, 1, 2]
STAGES: tuple[Stage, ...] = (0, 1, 2)


class ByPath(TinyMLP):
    """Every data-parallel rank may take a path of its own; one process takes the paths of two ranks."""

    def __init__(self) -> None:
        super().__init__(width=8)
        self.num_steps = 0

    def path(self, x: Tensor, rank: int) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += self.training
        if self.trainer.world_size > 1:
            return self.path(x, self.trainer.strategy.mesh.dp_rank)  # type: ignore[attr-defined]
        halves = torch.stack([self.path(x[rank::2], rank) for rank in range(2)], dim=1)  # as the sampler deals
        return halves.flatten(0, 1)


def _run(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


class Recomputed(ByPath):
    """All layers in reentrant checkpoints: backwards inside of the backward. Ranks leave out layers.

    Args:
        shares: Whether one weight is used in two checkpoints and outside.
        raw: Whether to call ``loss.backward()``.
    """

    def __init__(self, *, shares: bool, raw: bool = False) -> None:
        super().__init__()
        self.shares, self.raw, self.automatic_optimization = shares, raw, not raw

    def path(self, x: Tensor, rank: int) -> Tensor:
        first, *rest = self.layers
        run = partial(checkpoint, use_reentrant=True) if self.training else _run
        x, weight = x.clone().requires_grad_(self.training), first.weight
        for layer in [first, *rest[rank:-1], *rest[-1:]] if self.num_steps % 2 and not self.raw else self.layers:
            x = run(layer, x)
            if self.shares and x.shape[-1] == 8:
                x = run(lambda x: x + 0.1 * x @ weight, x)
        return x @ weight[:4, :4] if self.shares else x

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.raw:
            optimizer = self.optimizers()
            assert not isinstance(optimizer, list)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss


class UsedByOneRank(ByPath):
    """Layers that one rank uses, and in other steps the other one, or neither."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def path(self, x: Tensor, rank: int) -> Tensor:
        output: Tensor = self.layers(x)
        chosen = (self.num_steps + rank) % 3
        return output if chosen == 2 else output + self.extra[chosen](x)


class HooksOfUsers(TinyMLP):
    """Hooks that change gradients, before and after they are accumulated."""

    def __init__(self) -> None:
        super().__init__()
        first, second, *_ = self.parameters()
        first.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01) * 3)
        second.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


@dataclass(frozen=True)
class Case:
    """A model and what is set for it."""

    model: Callable[[], L.LightningModule]
    job: dict[str, Any] = field(default_factory=dict)
    zero: dict[str, Any] = field(default_factory=dict)


class _PassesFirst(torch.autograd.Function):
    """Adds, but gives the second summand no gradient."""

    @staticmethod
    def forward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]  # torch declares Any
        return gradient, None


class GivesNoGradient(TinyMLP):
    """A weight is reached by the backward, but gets no gradient from it."""

    def __init__(self) -> None:
        super().__init__()
        self.unheard = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _PassesFirst.apply(super().forward(x), self.unheard(x))  # type: ignore[no-untyped-call]  # torch 2.13
        return output


CASES = {
    "reentrant": Case(partial(Recomputed, shares=False)),
    "reentrant, shared": Case(partial(Recomputed, shares=True)),
    "reentrant, raw backward": Case(partial(Recomputed, shares=True, raw=True)),
    "tiny buckets": Case(UsedByOneRank, zero={"bucket_size": 1e-4}),
    "gives no gradient": Case(GivesNoGradient),
    "hooks": Case(HooksOfUsers),
    "incomplete window": Case(TinyMLP, job={"accumulate_grad_batches": 3, "num_missing": 8}),
}


@pytest.mark.parametrize(
    ("name", "stage"),
    list(itertools.product(CASES, STAGES)),
)
def test_gradients_add_up(workers: WorkerPools, name: str, stage: Stage) -> None:
    case = CASES[name]
    job = Job(model=case.model, data=features, sees_gradients=False, num_val_batches=1, steps=4, **case.job)
    layout = Layout(dp=2, zero=stage, zero_settings=case.zero)
    assert_parity(run_reference(job), run_layout(workers, job, layout), tolerance=1e-5)


def _launched_before_the_end(layout: Layout) -> list[bool]:
    launched: list[bool] = []
    end_step = PlainParameters.end_step

    def look(zero: PlainParameters) -> None:
        launched.extend(reducer.is_launched for reducer in zero._reducers.values())
        end_step(zero)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainParameters, "end_step", look)
        trainer = L.Trainer(strategy=layout.strategy(), devices=4, max_steps=2, enable_checkpointing=False, **QUIET)
        trainer.fit(TinyMLP(), loader(features(32), global_batch_size=16, data_parallel_size=2))
    return launched


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_reduces_in_the_last_backward_of_a_stage(workers: WorkerPools, schedule: Any) -> None:
    layout = Layout(pp=2, dp=2, zero=1, schedule=schedule, num_microbatches=2)
    for launched in workers(4).run(_launched_before_the_end, layout):
        assert len(launched) >= 2
        assert all(launched)
