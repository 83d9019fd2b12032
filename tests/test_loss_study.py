"""What is found out about a step from its code after the blocks alone, in one process."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.model.blocks import find_blocks
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.loss_kind import LossKind
from lightning_3d.pipeline.loss_study import LossFound, LossStudy
from lightning_3d.pipeline.traces import StepCall, Traces
from lightning_3d.trace.interception import routed
from lightning_3d.trace.step_tracing import StepTracing
from lightning_3d.zero.engine import RankModule
from tests.losses import CLASSES, LENGTH, LOSSES, LossNet, labelled


def _batch(num_samples: int) -> list[Tensor]:
    samples = [labelled(num_samples)[i] for i in range(num_samples)]
    return [torch.stack(column) for column in zip(*samples, strict=True)]


@contextmanager
def _studied(model: L.LightningModule, batch: Any) -> Iterator[tuple[LossStudy, StepCall]]:
    with routed(find_blocks(model, "parameters")) as router:
        model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
        device = torch.device("cpu")
        traces = Traces(model, router.blocks.values(), StepTracing(model, router, StepEffects(model, router), device))
        study = LossStudy(model, RankModule(model), router, traces, device)
        (call,) = traces.calls("training_step", [batch], (0,))
        yield study, call


def _found(model: L.LightningModule, batch: Any) -> LossFound | None:
    with _studied(model, batch) as (study, call):
        return study.find(call, size=4)


class Using(LossNet):
    """Has a loss of all that its blocks gave and of its labels; its features may come from them and noise of a step."""

    def __init__(self, loss: Callable[[dict[str, Tensor], Tensor], Tensor], features: Any = lambda x: x) -> None:
        super().__init__("mean")
        self.of_outputs, self.features = loss, features

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.of_outputs(self(self.features(batch[0])), batch[1])


def _denoised(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.mse_loss(outputs["logits"], torch.randn(outputs["logits"].shape))


def _dropped(of: Callable[[Tensor], Tensor], *, inplace: bool) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda outputs, labels: of(F.dropout(outputs["pooled"] * 2, 0.5, inplace=inplace).square())


def _noisy(x: Tensor) -> Tensor:
    return x + torch.randn(len(x), LENGTH, CLASSES)[..., :1]


def _flooded(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return (LOSSES["mean"](outputs, labels) - 0.1).abs() + 0.1


def _at_least_one(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    valid = labels > 0
    return (outputs["logits"].square().mean(-1) * valid).sum() / valid.sum().clamp(min=1)


def _with(term: Callable[[Tensor], Tensor], weight: Any, scale: float = 1.0) -> Using:
    """Has a term whose weight is to rise."""

    def loss(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        total = LOSSES["mean"](outputs, labels)
        total += weight * term(outputs["pooled"])
        return total / scale

    return Using(loss)


def _coupled(pooled: Tensor) -> Tensor:
    return pooled.mean(0).square().sum()


KINDS: dict[str, tuple[LossNet, LossKind]] = {
    "summed": (LossNet("summed"), LossKind.SUM),
    "ignoring": (LossNet("ignoring"), LossKind.WEIGHTED),
    "smoothed": (LossNet("smoothed"), LossKind.WEIGHTED),
    "balanced": (LossNet("balanced"), LossKind.WHOLE),
    "noise of the step": (Using(_denoised, _noisy), LossKind.MEAN),
    "hardest sample": (Using(lambda o, y: o["logits"].square().mean((1, 2)).max()), LossKind.WHOLE),
    "bent at some value": (Using(_flooded), LossKind.WHOLE),
    **{
        f"{of.__name__} behind dropout, {inplace}": (Using(_dropped(of, inplace=inplace)), kind)
        for inplace in (False, True)
        for of, kind in ((Tensor.mean, LossKind.MEAN), (Tensor.sum, LossKind.SUM), (Tensor.std, LossKind.WHOLE))
    },
    "next to nothing that couples": (_with(_coupled, 1e-9), LossKind.WHOLE),
    "no number yet that couples": (_with(_coupled, 0.0), LossKind.WHOLE),
    "nothing yet that couples": (_with(_coupled, torch.tensor(0.0), 2.0), LossKind.WHOLE),
    "next to nothing that is summed": (_with(lambda pooled: pooled.square().sum(), 1e-9), LossKind.WHOLE),
    "nothing yet that is a mean": (_with(lambda pooled: pooled.square().mean(), torch.tensor(0.0)), LossKind.MEAN),
    "divided by one at least": (Using(_at_least_one), LossKind.WHOLE),
    "shuffled after the blocks": (
        Using(lambda o, y: (o["pooled"] * o["pooled"][torch.randperm(len(y))]).sum(1).mean()),
        LossKind.WHOLE,
    ),
    "made of picked rows": (Using(LOSSES["selected"]), LossKind.WHOLE),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_losses(name: str) -> None:
    """With all but the odd ones the law trains."""
    model, kind = KINDS[name]
    found = _found(model, _batch(8))
    assert found is not None
    assert (found.kind, found.failure) == (kind, None)
    assert bool(found.denominators) == (kind == LossKind.WEIGHTED)


def _of_sampled(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    probabilities = outputs["pooled"].square()
    return probabilities.gather(1, torch.multinomial(probabilities, 1)).mean()


def test_randomness_after_the_blocks_is_told() -> None:
    found = _found(Using(_of_sampled), _batch(8))
    assert found is not None
    assert found.kind == LossKind.WHOLE  # where nothing needs to stand in for it
    assert "multinomial" in str(found.failure)
    assert "draws random numbers after the blocks" in str(found.failure)


def _mixed(rows: Callable[[int], Any]) -> Callable[[Tensor], Tensor]:
    return lambda x: 0.7 * x + 0.3 * x[rows(len(x))]


def _at_times(x: Tensor) -> Tensor:
    return x.lerp(x.flip(0), 0.3) if random.random() < 0.3 else x


def _at_times_by_torch(x: Tensor) -> Tensor:
    return x.lerp(x.flip(0), 0.3) if torch.rand(()) < 0.3 else x


class Between(Using):
    """Has code between its blocks."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__(LOSSES["mean"])
        self.between = between

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, _ = self.blocks[0](self.first(x))
        x, _ = self.blocks[1](self.between(x))
        return {"logits": self.head(x)}


def _before(features: Callable[[Tensor], Tensor]) -> Using:
    return Using(LOSSES["mean"], features)


COUPLES = "couples samples"
COUPLING: dict[str, tuple[LossNet, str | None]] = {
    "flipped": (_before(lambda x: x.lerp(x.flip(0), 0.3)), COUPLES),
    "rolled": (_before(lambda x: x + x.roll(1, 0)), COUPLES),
    "in another order": (_before(lambda x: x.flip(0)), COUPLES),
    "shuffled by torch": (_before(_mixed(torch.randperm)), "randperm .* draws random numbers"),
    "picked by torch": (_before(_mixed(lambda n: torch.randint(n, (n,)))), "randint .* draws random numbers"),
    "shuffled by NumPy": (_before(_mixed(np.random.permutation)), "draws other numbers of Python's or NumPy's"),
    "at times": (_before(_at_times), COUPLES),
    "at times by torch": (_before(_at_times_by_torch), COUPLES),
    "less its mean": (_before(lambda x: x - x.mean(0)), COUPLES),
    "less a number": (_before(lambda x: x - float(x.mean())), COUPLES),
    "between blocks": (Between(lambda x: x.lerp(x.flip(0), 0.3)), COUPLES),
    "flipped before dropout": (_before(lambda x: F.dropout(x.flip(0), 0.5)), COUPLES),
    "flipped before dropout in place": (_before(lambda x: F.dropout(x.flip(0), 0.5, inplace=True)), COUPLES),
    "flipped before it is drawn for": (_before(lambda x: torch.bernoulli(x.flip(0).sigmoid())), COUPLES),
    "changed in place": (_before(lambda x: x.mul_(2)), None),
    "flipped in place": (_before(lambda x: x.mul_(0.7).add_(x.flip(0), alpha=0.3)), COUPLES),
    "sorted by torch": (_before(lambda x: x[torch.rand(len(x)).argsort()]), COUPLES),
    "a factor of torch's": (_before(lambda x: F.dropout(x, 0.5) * torch.rand(())), None),
    "noise": (_before(_noisy), None),
    "noise of a time": (_before(lambda x: x + torch.randint(0, 9, (len(x), 1, 1))), None),
    "a factor of NumPy's": (_before(lambda x: x * np.random.beta(1, 1)), None),
    "views": (Using(lambda o, y: o["pooled"].square().mean(), lambda x: torch.cat([x, 2 * x])), None),
    "dropout between blocks": (Between(lambda x: F.dropout(x, 0.5).mul_(2) + torch.rand(len(x), 1, 1)), None),
}


@pytest.mark.parametrize("name", COUPLING)
def test_code_before_and_between_blocks_that_couples_samples_is_seen(name: str) -> None:
    model, problem = COUPLING[name]
    with _studied(model, _batch(8)) as (study, call):
        found = study.coupling(call, size=4)
    if problem is None:
        assert found is None
    else:
        assert re.search(problem, str(found))


def test_what_is_found_holds_for_the_options_of_calls() -> None:
    """Which may stand in a dict or come from a schedule, where no flag of a module tells."""
    paths = {}
    for reduction, size in (("mean", 8), ("sum", 8), ("mean", 6)):

        def loss(outputs: dict[str, Tensor], labels: Tensor, reduction: str = reduction) -> Tensor:
            return F.mse_loss(outputs["logits"], torch.zeros(len(labels), LENGTH, CLASSES), reduction=reduction)

        with _studied(Using(loss), _batch(size)) as (study, call):
            paths[reduction, size] = study.trace(call).path
    assert paths["mean", 8] != paths["sum", 8]
    assert paths["mean", 8] == paths["mean", 6]


class Centred(nn.Module):
    def __init__(self, couples: bool) -> None:
        super().__init__()
        self.linear, self.couples, self.num_calls = nn.Linear(16, 16), couples, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.linear(x)
        return F.dropout(x + y - y.mean(0 if self.couples else 2, keepdim=True), 0.1)


class Stack(L.LightningModule):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(8, 16), nn.ModuleList(blocks), nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.last(x).square().mean()
        return loss


def test_blocks_that_couple_samples_are_named_and_left_as_they_were() -> None:
    blocks = Centred(couples=False), Centred(couples=True), Centred(couples=True)
    for own, expected in ((blocks[1:], ("blocks.0", "blocks.1")), (blocks[:1], ())):
        with _studied(Stack(*own), _batch(8)) as (study, call):
            state = torch.get_rng_state()
            assert study.coupling_blocks(call, size=4) == expected
            assert torch.equal(state, torch.get_rng_state())
    assert {block.num_calls for block in blocks} == {0}


class Experts(nn.Module):
    """Takes rows one by one in the order of the batch, until an expert's capacity is filled."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.gate, self.linear, self.capacity = nn.Linear(16, 2), nn.Linear(16, 16), capacity

    def forward(self, x: Tensor) -> Tensor:
        chosen = F.one_hot(self.gate(x).argmax(-1), 2)
        has_room = (chosen.cumsum(0) * chosen).sum(-1, keepdim=True) <= self.capacity
        return x + self.linear(x) * has_room


@pytest.mark.parametrize("capacity", [2, 100])
def test_blocks_whose_first_samples_take_the_room_of_later_ones_are_named(capacity: int) -> None:
    with _studied(Stack(Experts(capacity)), _batch(8)) as (study, call):
        assert study.coupling_blocks(call, size=4) == (("blocks.0",) if capacity == 2 else ())


class Regular(nn.Module):
    """Also gives a loss of its own, as codebooks and experts do."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.dropout, self.loss = nn.Linear(16, 16), nn.Dropout(0.1), loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return x + y, self.loss(self.dropout(y))


class Regularised(L.LightningModule):
    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.block, self.last = nn.Linear(8, 16), Regular(loss), nn.Linear(16, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, own = self.block(self.first(batch[0]))
        loss: Tensor = self.last(x).square().mean() + 0.1 * own
        return loss


class Balanced(nn.Module):
    """Gives the loss of Switch Transformers that balances experts: of the batch's shares of rows and probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x + 2).softmax(-1).flatten(0, -2)  # one expert takes all of what is alike
        shares = F.one_hot(probabilities.argmax(-1), 4).float().mean(0)
        return x, 4 * (shares * probabilities.mean(0)).sum()


class Balances(Regularised):
    def __init__(self) -> None:
        super().__init__(Tensor.mean)
        self.block = Balanced()  # type: ignore[assignment]


def test_a_block_whose_loss_balances_experts_is_named() -> None:
    with _studied(Balances(), _batch(8)) as (study, call):
        assert study.coupling_blocks(call, size=4) == ("block",)


OWN_LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "mean": (lambda y: y.square().mean(), False),
    "constant": (lambda y: torch.ones(()), False),
    "sum": (lambda y: y.square().sum(), True),
    "of the batch's mean": (lambda y: y.mean(0).square().sum(), True),
    "use of codes": (lambda y: torch.special.entr((9 * y).softmax(-1).mean((0, 1))).sum(), True),
    "certainty of codes": (lambda y: torch.special.entr((9 * y).softmax(-1)).sum(-1).mean(), False),
}


@pytest.mark.parametrize("name", OWN_LOSSES)
def test_blocks_whose_own_loss_is_no_mean_over_samples_are_named(name: str) -> None:
    loss, couples = OWN_LOSSES[name]
    with _studied(Regularised(loss), _batch(8)) as (study, call):
        assert study.coupling_blocks(call, size=4) == (("block",) if couples else ())
