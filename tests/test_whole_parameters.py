"""Optimizers that need whole parameters, each of which one data-parallel rank owns: states, checkpoints, misuse."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from lightning_3d import ThreeDStrategy
from lightning_3d.zero.owners import choose_owners
from tests.models import TinyMLP, features, loader
from tests.optimizers import Lamb, Lars, Lion
from tests.parity import QUIET, Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

# ---- owners


def _sizes(owners: dict[nn.Parameter, int], num_ranks: int) -> list[int]:
    return [sum(parameter.numel() for parameter, owner in owners.items() if owner == rank) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_owners_are_balanced(num_ranks: int) -> None:
    model = TinyMLP(width=48, num_layers=16)
    sizes = _sizes(choose_owners(model.parameters(), num_ranks, {}), num_ranks)
    assert max(sizes) <= 1.1 * sum(sizes) / num_ranks


def test_owners_of_one_huge_parameter_and_of_few() -> None:
    huge, *small = [nn.Parameter(torch.empty(size)) for size in (10_000, 30, 20, 20, 10)]
    owners = choose_owners([*small, huge], 3, {})
    assert sorted(_sizes(owners, 3)) == [40, 40, 10_000]
    assert sorted(_sizes(choose_owners([huge], 3, {}), 3)) == [0, 0, 10_000]


def test_owners_of_parameters_that_stages_share() -> None:
    first, second, both = [nn.Parameter(torch.empty(size)) for size in (100, 100, 60)]
    small = [nn.Parameter(torch.empty(20)) for _ in range(4)]
    stages = {first: (0,), second: (1,), both: (0, 1), **dict.fromkeys(small, (1,))}
    owners = choose_owners([first, second, both, *small], 2, stages)
    for stage in (0, 1):
        held = {parameter: owner for parameter, owner in owners.items() if stage in stages[parameter]}
        assert max(_sizes(held, 2)) <= 120


# ---- states


class Trained(TinyMLP):
    """Parameters that do not divide, one of them frozen, and some of no dims or of no use."""

    make: Callable[[Any], Optimizer] = Lars

    def __init__(self, width: int = 7, num_layers: int = 2) -> None:
        super().__init__(width=width, num_layers=num_layers)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.frozen[0]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def trained_by(make: Callable[[Any], Optimizer], width: int = 7, num_layers: int = 2) -> Trained:
    model = Trained(width, num_layers)
    model.make = make
    return model


@pytest.mark.parametrize("layout", [Layout(dp=3, zero=2), Layout(pp=2, dp=2, zero=1)], ids=str)
def test_each_state_is_on_one_rank(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=partial(trained_by, Lars, 32, 8), data=features, global_batch_size=12, gradient_clip_val=0.2)
    reference = run_reference(job)
    result = run_layout(workers, job, layout)
    assert_parity(reference, result, tolerance=1e-5)
    assert not [warning for warning in result.warnings if "whole parameters" in warning]
    trained = {
        name: n for name, n in reference.parameters.items() if not name.startswith(("scale", "frozen", "unused"))
    }
    states = [held.optimizer_state for held in result.held]
    for name, size in trained.items():
        assert [state[name] for state in states if name in state] == [size]
    whole = sum(trained.values())
    assert max(sum(state.values()) for state in states) <= 1.2 * whole / (layout.dp * layout.pp)


def test_the_plan_says_who_steps_what(workers: WorkerPools) -> None:
    job = Job(model=partial(trained_by, Lars, 32), data=features, sees_gradients=False, num_val_batches=1)
    plan = run_layout(workers, job, Layout(dp=2, zero=1)).plan
    (lars,) = plan.optimizers
    assert (lars.name, lars.kind, lars.found) == ("Lars", "parameters", "tried on small tensors")
    assert lars.shares == "whole parameters, 10 over 2 ranks, largest share 50%"
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(plan)
    assert "tried on small tensors" in console.export_text()
    settings = {"optimizer_steps": "parameters"}
    (lion,) = run_layout(workers, _job(Lion), Layout(dp=2, zero=2, zero_settings=settings)).plan.optimizers
    assert (lion.found, lion.shares[:16]) == ("set by zero.optimizer_steps", "whole parameters")
    (lion,) = run_layout(workers, _job(Lion), Layout(dp=2, zero=2)).plan.optimizers
    assert lion.shares == "rows of each parameter over 2 ranks"


def _job(make: Callable[[Any], Optimizer], **settings: Any) -> Job:
    return Job(model=partial(trained_by, make), data=features, sees_gradients=False, num_val_batches=1, **settings)


@pytest.mark.parametrize("stage", [1])
def test_elementwise_optimizers_may_step_whole_parameters(workers: WorkerPools, stage: Literal[1, 2]) -> None:
    job = _job(partial(AdamW, lr=0.01, eps=1e-3), global_batch_size=12, accumulate_grad_batches=2)
    layout = Layout(dp=3, zero=stage, zero_settings={"optimizer_steps": "parameters"})
    assert_parity(run_reference(job), run_layout(workers, job, layout), tolerance=1e-5)


# ---- failures


class Failing(Lamb):
    """Fails on one parameter, in the third step."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        step = self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        if step == 3 and parameter.shape == (7, 8):
            raise torch.linalg.LinAlgError("did not converge")
        super().update(parameter, gradient, group)


class Skipping(TinyMLP):
    """Goes on after a step that fails."""

    def __init__(self) -> None:
        super().__init__(width=7)
        self.num_skipped = 0

    def configure_optimizers(self) -> Any:
        return Failing(self.parameters())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().optimizer_step(*args, **kwargs)
        except torch.linalg.LinAlgError as error:
            self.num_skipped += "did not converge" in str(error)


def _skip() -> tuple[int, list[Tensor]]:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(devices=2, strategy=ThreeDStrategy(), max_epochs=1, enable_checkpointing=False, **QUIET)
    model, data = Skipping(), loader(features(40), global_batch_size=8, data_parallel_size=2)
    trainer.fit(model, data, data)
    return model.num_skipped, [parameter.detach() for parameter in model.parameters()]


def test_a_step_that_fails_on_the_owner_fails_everywhere(workers: WorkerPools) -> None:
    (first, values), (second, others) = workers(2).run(_skip)
    assert first == second == 1
    for value, other in zip(values, others, strict=True):
        assert torch.equal(value, other)
