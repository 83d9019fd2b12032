"""How optimizers step (element by element, whole parameters, all together), and which are refused on parts.

That they step as in one process the law shows.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
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

from lightning_3d.errors import StepError
from lightning_3d.run.decide.remembered import remembering_attribute
from lightning_3d.zero.optimizer_kind import OptimizerKind, optimizer_kind
from tests.models import TinyMLP, features, training_loader
from tests.optimizers import (
    Chained,
    ClippingAdam,
    Derived,
    Lamb,
    Lars,
    Lion,
    Lookahead,
    Normed,
    Noted,
    Prodigy,
    Sam,
    ScheduleFree,
    Shampoo,
    SharedMuon,
    Switched,
)
from tests.parity import QUIET, Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

Make = Callable[[Any], Optimizer]

ELEMENTWISE: dict[str, Make] = {
    "SGD": partial(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": partial(SGD, momentum=0.9, foreach=True),
    "SGD, fused": partial(SGD, momentum=0.9, fused=True),
    "Adam": partial(Adam, amsgrad=True),
    "AdamW, foreach": partial(AdamW, foreach=True),
    "AdamW, fused": partial(AdamW, fused=True),
    "Adagrad": partial(Adagrad, initial_accumulator_value=0.1),
    "RMSprop": partial(RMSprop, momentum=0.5, centered=True),
    **{make.__name__: make for make in (NAdam, RAdam, Adamax, Adadelta, ASGD, Rprop)},
}


def _chained(parameters: Iterable[nn.Parameter], *, vectors: Make, saves: str = "list") -> Optimizer:
    """SGD for matrices, and another optimizer for the rest, as one."""
    every = list(parameters)
    matrices, others = ([p for p in every if (p.dim() == 2) is are_matrices] for are_matrices in (True, False))
    return Chained(SGD(matrices, lr=0.1, momentum=0.9), vectors(others), saves=saves)


KINDS: dict[OptimizerKind, dict[str, Make]] = {
    "elements": {
        **ELEMENTWISE,
        **{make.__name__: make for make in (Lion, ScheduleFree, Switched, Derived)},
        "Lookahead of AdamW": lambda parameters: Lookahead(AdamW(parameters)),
        "chain of SGD and AdamW": partial(_chained, vectors=AdamW),
    },
    "parameters": {
        **{make.__name__: make for make in (Lamb, Lars, Shampoo, Adafactor, Muon)},
        **{f"by {name}": partial(Noted, by=name) for name in ("attribute", "state")},
        "Lookahead of Lamb": lambda parameters: Lookahead(Lamb(parameters)),
        "chain of SGD and Lamb": partial(_chained, vectors=Lamb),
    },
    "all": {make.__name__: make for make in (ClippingAdam, Prodigy, LBFGS, Sam)},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, makes in KINDS.items() for name in makes])
def test_kinds_are_found(kind: OptimizerKind, name: str) -> None:
    parameters = [nn.Parameter(torch.ones(4, 3))] + [nn.Parameter(torch.ones(4))] * (name != "Muon")
    optimizer = KINDS[kind][name](parameters)
    before = [parameter.detach().clone() for parameter in parameters]
    states, state = torch.get_rng_state(), copy.deepcopy(optimizer.state_dict())
    assert optimizer_kind(optimizer) == kind
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))
    assert str(optimizer.state_dict()) == str(state)
    assert torch.equal(torch.get_rng_state(), states)


def test_torch_s_elementwise_optimizers_are_found_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_3d.zero.optimizer_kind._ELEMENTWISE", ())
    for name, make in ELEMENTWISE.items():
        assert optimizer_kind(make([nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4))])) == "elements", name


class Trained(TinyMLP):
    """Stepped by another optimizer."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.make = {name: make for makes in KINDS.values() for name, make in makes.items()}[name]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def _refusal(fit: Callable[[Layout], object], layout: Layout) -> str:
    with pytest.raises(StepError) as raised:
        fit(layout)
    return str(raised.value)


class Telling(Trained):
    """Has an optimizer that tells parameters by a set."""

    def __init__(self) -> None:
        TinyMLP.__init__(self)
        self.make = partial(Noted, by="set")


def _fit_telling(layout: Layout) -> None:
    fitted(layout, Telling, data=features, batches=1, epochs=1)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(tp=2)], ids=str)
def test_those_that_tell_parameters_by_their_identity_are_refused_on_parts(
    workers: WorkerPools, layout: Layout
) -> None:
    with pytest.raises(WorkerError, match=r"Noted tells parameters by what is in its attribute 'named'"):
        workers(2).run(_fit_telling, layout)
    workers(2).run(_fit_telling, Layout(dp=2, zero=0))


def test_references_are_found_inside_of_others() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    wrapper, inner = Prodigy(parameters), SGD(parameters)
    wrapper.inner = {"inner": inner}
    assert remembering_attribute(wrapper) == "inner"
    inner.param_groups = wrapper.param_groups
    assert remembering_attribute(wrapper) is None
    wrapper.ids = [id(parameters[0])]
    assert remembering_attribute(wrapper) == "ids"
    assert remembering_attribute(LBFGS(parameters)) is None


class Evaluated(Trained):
    """Switches its optimizer around evaluations."""

    def on_train_start(self) -> None:
        self.optimizers().train()

    def on_validation_start(self) -> None:
        self.optimizers().eval()

    def on_validation_end(self) -> None:
        self.optimizers().train()


def _evaluated(layout: Layout | None) -> tuple[dict[str, Tensor], float]:
    trainer, _ = fitted(layout, partial(Evaluated, "Switched"), data=features)
    return whole_state(trainer), float(trainer.callback_metrics["val_loss"])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2), Layout(pp=2)], ids=str)
def test_modes_of_schedule_free_ones(workers: WorkerPools, layout: Layout) -> None:
    weights, loss = _evaluated(None)
    for of_rank, found in workers(2).run(_evaluated, layout):
        assert_same_state([of_rank], weights)
        assert found == pytest.approx(loss, abs=1e-5)


class Shared(TinyMLP):
    """Has an optimizer that communicates, at once or after some steps."""

    def __init__(self, alone: int) -> None:
        super().__init__()
        self.alone = alone

    def configure_optimizers(self) -> Any:
        return SharedMuon(self.parameters(), alone=self.alone)


def _fit_shared(layout: Layout | None, alone: int = 0) -> dict[str, Tensor]:
    """The weights that two replicas train, with DDP where there is no layout."""
    L.seed_everything(1, verbose=False)
    strategy = DDPStrategy() if layout is None else layout.strategy()
    trainer = L.Trainer(**QUIET, strategy=strategy, devices=2, max_epochs=alone + 2, enable_checkpointing=False)
    dp = 2 if layout is None else layout.dp
    trainer.fit(Shared(alone), training_loader(features(16), global_batch_size=8, data_parallel_size=dp))
    return whole_state(trainer)


@pytest.mark.parametrize("zero", [0, 2])
def test_one_that_communicates_steps_as_under_ddp(workers: WorkerPools, zero: Any) -> None:
    expected = workers(2).run(_fit_shared, None)
    for of_rank, of_ddp in zip(workers(2).run(_fit_shared, Layout(dp=2, zero=zero)), expected, strict=True):
        assert_same_state([of_rank], of_ddp, tolerance=0)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3),
        Layout(tp=2),
        Layout(pp=2),
        Layout(dp=2, zero=1, zero_settings={"optimizer_steps": "parameters"}),
    ],
    ids=str,
)
def test_one_that_communicates_is_refused_on_parts(workers: WorkerPools, layout: Layout) -> None:
    lines = workers(2).run(_refusal, _fit_shared, layout)
    assert lines[0] == lines[1]
    assert re.match("SharedMuon communicates in its step.*single-device class", lines[0])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(tp=2), Layout(pp=2)], ids=str)
def test_one_that_communicates_late_is_refused_then(workers: WorkerPools, layout: Layout) -> None:
    with pytest.raises(WorkerError, match=r"StepError: SharedMuon communicates in its step"):
        workers(2).run(_fit_shared, layout, 21)


class InBackward(TinyMLP):
    """Has an optimizer for each parameter, which steps as soon as its gradient is there, as torch's tutorial on memory:
    https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html.
    """

    def configure_optimizers(self) -> None:
        self.each = {parameter: AdamW([parameter], lr=1e-2) for parameter in self.parameters()}
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, parameter: Any) -> None:
        self.each[parameter].step()
        self.each[parameter].zero_grad()


def _fit_in_backward(layout: Layout | None) -> dict[str, Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* this fit will run with no optimizer")
        return whole_state(fitted(layout, InBackward, data=features)[0])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=0), Layout(dp=2, zero=3), Layout(pp=2)], ids=str)
def test_steps_inside_of_a_backward_are_refused(workers: WorkerPools, layout: Layout) -> None:
    assert all(
        re.search(r"AdamW.step\(\) was called inside of a backward.* zero.stage=2 or 3", line)
        for line in workers(2).run(_refusal, _fit_in_backward, layout)
    )


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_steps_inside_of_a_backward_that_has_all_gradients(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(layout.world_size).run(_fit_in_backward, layout), _fit_in_backward(None))


class ChainedMLP(TinyMLP):
    """Steps weights and biases by optimizers of their own, as one."""

    def __init__(self, saves: str) -> None:
        super().__init__()
        self.saves = saves

    def configure_optimizers(self) -> Any:
        return _chained(self.parameters(), vectors=AdamW, saves=self.saves)


def _fit_chained(saves: str, layout: Layout, *, checkpointing: bool = True) -> None:
    fitted(layout, partial(ChainedMLP, saves), data=features, enable_checkpointing=checkpointing)


@pytest.mark.parametrize(
    ("saves", "form"),
    [("list", "a list"), ("dict", r"the keys \['optimizers'\]"), ("groups", "1 groups of other sizes")],
)
def test_states_of_another_form_than_torch_s_are_refused_before_training(
    workers: WorkerPools, saves: str, form: str
) -> None:
    lines = workers(2).run(_refusal, partial(_fit_chained, saves), Layout(dp=2, zero=0))
    assert re.search(rf"Chained.state_dict\(\) gives {form}.*enable_checkpointing=False", lines[0])
    assert lines[0] == lines[1]


def test_states_that_nothing_saves_may_have_any_form(workers: WorkerPools) -> None:
    workers(2).run(partial(_fit_chained, checkpointing=False), "list", Layout(dp=2, zero=0))


class SwitchedNormed(TinyMLP):
    """Switches a setting of its optimizer in the second epoch: to `value`."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value

    def configure_optimizers(self) -> Any:
        return Normed(self.parameters())

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].param_groups[0]["normed"] = self.value


def _fit_switched(value: object, layout: Layout | None) -> dict[str, Tensor]:
    return whole_state(fitted(layout, partial(SwitchedNormed, value), data=features)[0])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2)], ids=str)
def test_settings_that_make_another_kind_of_it_are_refused(workers: WorkerPools, layout: Layout) -> None:
    lines = workers(2).run(_refusal, partial(_fit_switched, True), layout)
    assert lines[0] == lines[1]
    assert "works on 'parameters' since code set param_groups[0]['normed'] = True" in lines[0]


@pytest.mark.parametrize(
    ("value", "layout"),
    [
        ("", Layout(dp=2, zero=1)),  # of no consequence
        (True, Layout(dp=2, zero=0)),
        (True, Layout(pp=2)),
        (True, Layout(dp=2, zero=1, zero_settings={"optimizer_steps": "parameters"})),
    ],
    ids=str,
)
def test_settings_may_change_where_the_layout_serves_both(workers: WorkerPools, value: object, layout: Layout) -> None:
    assert_same_state(workers(2).run(_fit_switched, value, layout), _fit_switched(value, None))


class Scheduled(TinyMLP):
    """Learns at rates that transformers' schedule reads from its optimizer's states."""

    def configure_optimizers(self) -> Any:
        transformers = pytest.importorskip("transformers.optimization")
        optimizer = transformers.Adafactor(self.parameters())
        return [optimizer], [{"scheduler": transformers.AdafactorSchedule(optimizer), "interval": "step"}]


def _rates(layout: Layout | None) -> list[float]:
    trainer, _ = fitted(layout, Scheduled, data=features)
    return [group["lr"] for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(tp=2), Layout(pp=2)], ids=str)
def test_schedules_that_read_states_are_refused_where_ranks_lack_them(workers: WorkerPools, layout: Layout) -> None:
    lines = workers(2).run(_refusal, _rates, layout)
    assert lines[0] == lines[1]
    assert "AdafactorSchedule reads states of the optimizer" in lines[0]


def test_schedules_that_read_states_where_ranks_have_them(workers: WorkerPools) -> None:
    (rate,) = _rates(None)
    assert rate > 0
    assert workers(2).run(_rates, Layout(dp=2, zero=0)) == [[pytest.approx(rate)]] * 2


class Reading(TinyMLP):
    """Reads a state of every parameter after the first step."""

    def configure_optimizers(self) -> Any:
        return Lars(self.parameters())

    def on_train_batch_end(self, *_: object) -> None:
        state = self.trainer.optimizers[0].state
        self.momenta = [state[parameter]["momentum"] for parameter in self.parameters()]


def _fit_reading(layout: Layout) -> None:
    fitted(layout, Reading, data=features, batches=1, epochs=1)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(pp=2)], ids=str)
def test_states_that_a_rank_lacks_say_so_when_read(workers: WorkerPools, layout: Layout) -> None:
    for line in workers(2).run(_refusal, _fit_reading, layout):
        assert "the state 'momentum' was read of a parameter that another rank steps" in line


WRAPPERS = ("Lookahead of AdamW", "Lookahead of Lamb", "chain of SGD and Lamb")


def _wrapped(name: str, layout: Layout | None) -> dict[str, Tensor]:
    return whole_state(fitted(layout, partial(Trained, name), data=features)[0])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2), Layout(pp=2)], ids=str)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_step_as_in_one_process(workers: WorkerPools, name: str, layout: Layout) -> None:
    assert_same_state(workers(2).run(_wrapped, name, layout), _wrapped(name, None))


def _saved(name: str, layout: Layout | None, path: Path) -> None:
    fitted(layout, partial(Trained, name), data=features, epochs=1)[0].save_checkpoint(path)


def _resumed(name: str, layout: Layout | None, path: Path) -> dict[str, Tensor]:
    return whole_state(fitted(layout, partial(Trained, name), data=features, ckpt_path=path)[0])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=2, zero=3)], ids=str)
@pytest.mark.parametrize("name", WRAPPERS[:2])
def test_states_of_wrapped_optimizers_are_saved(
    workers: WorkerPools, tmp_path: Path, name: str, layout: Layout
) -> None:
    expected, path = _wrapped(name, None), tmp_path / "one.ckpt"
    workers(2).run(_saved, name, layout, path)
    assert_same_state([_resumed(name, None, path)], expected)
    assert_same_state(workers(2).run(_resumed, name, layout, path), expected)


def _fit_wrapped(how: dict[str, Any]) -> None:
    layout, precision = Layout(zero_settings=how.get("zero_settings", {})), how.get("precision", "32-true")
    fitted(layout, partial(Trained, WRAPPERS[0]), data=features, precision=precision)


@pytest.mark.parametrize(
    "how", [{"zero_settings": {"offload_optimizer": "cpu"}}, {"precision": "bf16-true"}], ids=["offload", "16 bits"]
)
def test_wrappers_are_refused_where_states_lie_elsewhere(workers: WorkerPools, how: dict[str, Any]) -> None:
    (line,) = workers(1).run(_refusal, _fit_wrapped, how)
    assert "Lookahead wraps AdamW, which has the states" in line
