"""Offloaded optimizer states and parameters: the same numbers as in one process, from host memory or files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.models import TinyMLP, features
from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.test_optimizers import _Trained as Trained
from tests.workers import WorkerError, WorkerPools

WINDOW = 0.005
"""MiB: smaller than the largest parameters, so that there are several windows and parameters are cut."""


_REFERENCES: dict[str, ReferenceRun] = {}


def _reference(job: Job) -> ReferenceRun:
    if str(job) not in _REFERENCES:
        _REFERENCES[str(job)] = run_reference(job)
    return _REFERENCES[str(job)]


def offloaded(layout: Layout, place: str, **settings: Any) -> Layout:
    return replace(layout, zero_settings={"offload_optimizer": place, "offload_window": WINDOW, **settings})


def _optimizers(name: str) -> Job:
    return Job(model=partial(Trained, name), data=features, sees_gradients=False, num_val_batches=1)


@pytest.mark.parametrize("name", ["SGD, fused", "Adam", "AdamW, foreach", "NAdam", "ASGD", "Lamb", "Muon"])
def test_optimizers(workers: WorkerPools, name: str) -> None:
    layout = offloaded(Layout(dp=2, zero=1), "states", offload_window=0.003)
    assert_parity(_reference(_optimizers(name)), run_layout(workers, _optimizers(name), layout), tolerance=1e-5)


class GroupCounting(torch.optim.SGD):
    """Counts steps in its group, and takes every other one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / group["count"])
        return loss


class SelfCounting(GroupCounting):
    """Counts calls of step elsewhere."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"] / self.count)
        return loss


class Grouped(TinyMLP):
    """Two groups, a frozen parameter, and a schedule, for an optimizer of any class."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.layers[1][0].bias.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        weights = [p for p in self.parameters() if p.dim() > 1]
        others = [p for p in self.parameters() if p.dim() == 1]
        groups = [{"params": weights, "lr": 0.05}, {"params": others, "lr": 0.02}]
        optimizer = {"GroupCounting": GroupCounting, "SelfCounting": SelfCounting}[self.optimizer](groups, lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


def test_steps_counted_in_a_group_count_once(workers: WorkerPools) -> None:
    job = Job(model=partial(Grouped, "GroupCounting"), data=features)
    for layout in (Layout(dp=2, zero=2), Layout(pp=2)):
        result = run_layout(workers, job, offloaded(layout, "cpu", offload_window=0.003))
        assert_parity(_reference(job), result, tolerance=1e-5)


@pytest.mark.parametrize("name", ["LBFGS", "ClippingAdam", "SelfCounting"])
def test_optimizers_that_step_all_together_are_refused(workers: WorkerPools, name: str) -> None:
    model = partial(Grouped, name) if name == "SelfCounting" else partial(Trained, name)
    job = Job(model=model, data=features, sees_gradients=False)
    with pytest.raises(WorkerError, match=f"StepError: {name} steps all parameters together.*offload_optimizer='cpu'"):
        run_layout(workers, job, offloaded(Layout(dp=2), "cpu"))
