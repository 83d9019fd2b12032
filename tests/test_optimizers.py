"""Optimizers of torch and others on local shards, in every kind of layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_3d.zero.optimizer_kind import OptimizerKind, num_states, optimizer_kind
from tests.models import TinyMLP, features
from tests.optimizers import ClippingAdam, Derived, Lamb, Lars, Lion, PickyLamb, Prodigy, Sam, ScheduleFree, Shampoo
from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerError, WorkerPools


class _Trained(TinyMLP):
    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        if optimizer == "Muon":  # takes matrices alone
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("weight" in name)

    def configure_optimizers(self) -> Any:
        return _make(self.optimizer)([parameter for parameter in self.parameters() if parameter.requires_grad])


EPS = 1e-3
ELEMENTWISE: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": partial(SGD, lr=0.05, momentum=0.9, foreach=True),
    "SGD, fused": partial(SGD, lr=0.05, momentum=0.9, fused=True),
    "Adam": partial(Adam, lr=0.01, eps=EPS, amsgrad=True),
    "AdamW, foreach": partial(AdamW, lr=0.01, eps=EPS, foreach=True),
    "AdamW, fused": partial(AdamW, lr=0.01, eps=EPS, fused=True),
    "NAdam": partial(NAdam, lr=0.01, eps=EPS),
    "RAdam": partial(RAdam, lr=0.01, eps=EPS),
    "Adamax": partial(Adamax, lr=0.01, eps=EPS),
    "Adadelta": partial(Adadelta, lr=0.5, eps=EPS),
    "Adagrad": partial(Adagrad, lr=0.01, eps=EPS, initial_accumulator_value=0.1),
    "RMSprop": partial(RMSprop, lr=0.01, eps=EPS, momentum=0.5, centered=True),
    "ASGD": partial(ASGD, lr=0.05),
    "Rprop": partial(Rprop, lr=0.01),
    "Lion": partial(Lion, lr=0.01),
    "ScheduleFree": ScheduleFree,
}
OTHERS: dict[str, Callable[[Any], Optimizer]] = {
    "Lamb": Lamb,
    "Lars": Lars,
    "Shampoo": Shampoo,
    "Adafactor": partial(Adafactor, lr=0.01),
    "Muon": partial(Muon, lr=0.01),
    "ClippingAdam": partial(ClippingAdam, lr=0.01, eps=EPS),
    "Prodigy": Prodigy,
}
CLOSURES: dict[str, Callable[[Any], Optimizer]] = {"LBFGS": partial(LBFGS, lr=0.1, max_iter=3), "Sam": Sam}
KINDS: dict[str, OptimizerKind] = {
    **dict.fromkeys(ELEMENTWISE, "rows"),
    "Lamb": "parameters",
    "Lars": "parameters",
    "Shampoo": "parameters",
    "Adafactor": "parameters",
    "Muon": "parameters",
    "ClippingAdam": "all",
    "Prodigy": "all",
    "LBFGS": "all",
    "Sam": "all",
}


def _make(name: str) -> Callable[[Any], Optimizer]:
    return {**ELEMENTWISE, **OTHERS, **CLOSURES}[name]


def _job(name: str) -> Job:
    return Job(model=partial(_Trained, name), data=features, sees_gradients=False, num_val_batches=1)


_REFERENCES: dict[str, ReferenceRun] = {}


def _reference(name: str) -> ReferenceRun:
    if name not in _REFERENCES:
        _REFERENCES[name] = run_reference(_job(name))
    return _REFERENCES[name]


@pytest.mark.parametrize("name", KINDS)
def test_kinds_are_found(name: str) -> None:
    parameters = [nn.Parameter(torch.ones(4, 3))] + [nn.Parameter(torch.ones(4))] * (name != "Muon")
    optimizer = _make(name)(parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    states, state = torch.get_rng_state(), copy.deepcopy(optimizer.state_dict())
    assert optimizer_kind(optimizer) == KINDS[name]
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert str(optimizer.state_dict()) == str(state)
    assert torch.equal(torch.get_rng_state(), states)


def test_torch_s_elementwise_optimizers_are_found_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_3d.zero.optimizer_kind._ELEMENTWISE", ())
    for name, make in ELEMENTWISE.items():
        assert optimizer_kind(make([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))])) == "rows", name


@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-3])
def test_kinds_are_found_at_any_learning_rate(lr: float) -> None:
    matrix, vector = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))
    assert optimizer_kind(Lamb([matrix, vector], lr=lr)) == "parameters"
    assert optimizer_kind(Muon([matrix], lr=lr)) == "parameters"
    assert optimizer_kind(Adafactor([matrix], lr=lr)) == "parameters"
    assert optimizer_kind(Derived([matrix, vector], lr=lr)) == "rows"


def test_kinds_are_found_in_every_group() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(4))], "weight_decay": 0.0}]
    groups.append({"params": [nn.Parameter(torch.ones(4, 3))], "weight_decay": 0.1})
    assert optimizer_kind(PickyLamb(groups)) == "parameters"


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=2), Layout(dp=2, zero=3), Layout(tp=2)], ids=str)
@pytest.mark.parametrize("name", ["SGD, fused", "Adam", "ASGD", "Rprop"])
def test_elementwise_optimizers(workers: WorkerPools, name: str, layout: Layout) -> None:
    """Each with states of another kind; `tests/law` has more."""
    assert_parity(_reference(name), run_layout(workers, _job(name), layout), tolerance=1e-5)


class _TrainedEarly(_Trained):
    """Has its optimizer before there is a Trainer, as LightningCLI makes those of its configuration."""

    def __init__(self, optimizer: str) -> None:
        super().__init__(optimizer)
        self.early = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.early


@pytest.mark.parametrize("layout", [Layout(pp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2)], ids=str)
def test_an_optimizer_of_before_the_fit(workers: WorkerPools, layout: Layout) -> None:
    job = replace(_job("Adam"), model=partial(_TrainedEarly, "Adam"))
    assert_parity(_reference("Adam"), run_layout(workers, job, layout))


@pytest.mark.parametrize("name", ["Shampoo", "Adafactor", "Muon"])
def test_others_step_whole_parameters(workers: WorkerPools, name: str) -> None:
    assert_parity(_reference(name), run_layout(workers, _job(name), Layout(dp=2, zero=2)), tolerance=1e-5)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("Lamb", Layout(dp=2, zero=3)), ("Muon", Layout(tp=2)), ("Prodigy", Layout(pp=2))],
    ids=str,
)
def test_others_are_refused_on_parts(workers: WorkerPools, name: str, layout: Layout) -> None:
    with pytest.raises(WorkerError, match=rf"StepError: {_class(name)} (needs whole|steps all) parameters"):
        run_layout(workers, _job(name), layout)


def _class(name: str) -> str:
    make = _make(name)
    return (make.func if isinstance(make, partial) else make).__name__  # type: ignore[attr-defined]


def _lbfgs(**settings: Any) -> Optimizer:
    return LBFGS([nn.Parameter(torch.randn(3, 5)), nn.Parameter(torch.randn(3))], **settings)


@pytest.mark.parametrize(
    "settings", [{"history_size": 7}, {"max_iter": 1, "history_size": 20}, {"line_search_fn": "strong_wolfe"}], ids=str
)
def test_all_that_lbfgs_will_remember_is_counted(settings: dict[str, Any]) -> None:
    optimizer, state = _lbfgs(**settings), torch.get_rng_state()
    assert num_states(optimizer) == 2 * settings.get("history_size", 100) + 2
    assert torch.equal(torch.get_rng_state(), state)
