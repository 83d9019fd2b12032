"""Optimizers of torch and others on local shards, in every kind of layout."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor, nn
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

from lightning_3d import ThreeDStrategy
from lightning_3d.zero.optimizer_kind import OptimizerKind, num_states, optimizer_kind
from tests.models import TinyMLP, features, loader, reference_loader
from tests.optimizers import ClippingAdam, Derived, Lamb, Lars, Lion, PickyLamb, Prodigy, Sam, ScheduleFree, Shampoo
from tests.parity import QUIET, Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
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


LAYOUTS = (*(Layout(dp=2, zero=stage) for stage in (0, 1, 2, 3)), Layout(tp=2), Layout(pp=2))

WITH_SHARDS = ("SGD, fused", "Adam", "AdamW, foreach", "NAdam", "ASGD", "Rprop", "ScheduleFree")
"""Optimizers that `make test` has on shards of parameters; others compute as one of them."""


def _is_in_matrix(name: str, layout: Layout) -> bool:
    """Whether `make test` has the optimizer with another layout, or another optimizer with it."""
    if layout == Layout(pp=2):
        return name not in ("Adam", "Lamb")
    if layout == Layout(dp=2, zero=1):
        return False
    return layout not in (Layout(dp=2, zero=3), Layout(tp=2)) or (name in ELEMENTWISE and name not in WITH_SHARDS)


@pytest.mark.parametrize(
    ("name", "layout"),
    some_in_matrix(itertools.product(ELEMENTWISE, LAYOUTS), _is_in_matrix),
    ids=str,
)
def test_elementwise_optimizers(workers: WorkerPools, name: str, layout: Layout) -> None:
    result = run_layout(workers, _job(name), layout)
    assert_parity(_reference(name), result, tolerance=1e-5)
    if layout.dp > 1 and layout.zero > 0 and name not in ("SGD, foreach", "SGD, fused", "ASGD"):
        for held in result.held:
            whole = sum(_reference(name).parameters.values())
            assert 0 < sum(held.optimizer_state.values()) <= 3 * whole / 2 * 1.1


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


@pytest.mark.parametrize(("name", "layout"), some_in_matrix(itertools.product(OTHERS, LAYOUTS), _is_in_matrix), ids=str)
def test_others_step_whole_parameters_or_are_refused(workers: WorkerPools, name: str, layout: Layout) -> None:
    is_whole = layout.zero < 3 and layout.tp == 1 and (layout.pp == 1 or KINDS[name] == "parameters")
    if is_whole:
        assert_parity(_reference(name), run_layout(workers, _job(name), layout), tolerance=1e-5)
        return
    with pytest.raises(WorkerError, match=rf"StepError: {_class(name)} (needs whole|steps all) parameters"):
        run_layout(workers, _job(name), layout)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_of_whole_parameters_are_clipped(workers: WorkerPools, stage: Literal[0, 1, 2]) -> None:
    job = replace(_job("Lamb"), gradient_clip_val=0.05, sees_gradients=True)
    assert_parity(run_reference(job), run_layout(workers, job, Layout(dp=2, zero=stage)), tolerance=1e-5)


def _train_with_closures(name: str, stage: Literal[0, 1, 2] | None) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    ranks = 1 if stage is None else 2
    strategy = "auto" if stage is None else ThreeDStrategy(zero={"stage": stage})
    trainer = L.Trainer(strategy=strategy, devices=ranks, max_epochs=1, enable_checkpointing=False, **QUIET)
    model, data = _Trained(name), features(32)
    train = reference_loader(data, global_batch_size=8, seed=1)
    if ranks > 1:
        train = loader(data, global_batch_size=8, data_parallel_size=ranks)
    trainer.fit(model, train, loader(data, global_batch_size=8, data_parallel_size=ranks))
    return {fqn: value.detach().clone() for fqn, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", CLOSURES)
def test_closures_that_run_several_times(workers: WorkerPools, name: str, stage: Literal[0, 1, 2]) -> None:
    expected = _train_with_closures(name, None)
    for trained in workers(2).run(_train_with_closures, name, stage):
        for fqn, value in expected.items():
            torch.testing.assert_close(trained[fqn], value, atol=1e-5, rtol=0)


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
