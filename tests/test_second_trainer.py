"""One model in the hands of several Trainers, and one Trainer with several models, as users of DDP have them."""

from __future__ import annotations

from contextlib import nullcontext
from operator import is_
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyGPT, loader, tokens, training_loader
from tests.parity import QUIET, Layout, assert_same_state, whole_state
from tests.workers import WorkerPools

LAYOUTS = {"zero3": Layout(dp=2, zero=3), "pp2": Layout(pp=2), "tp2": Layout(tp=2)}
PAIRS = [("pp2", "tp2"), ("tp2", "zero3"), ("zero3", "pp2")]


class Counts(TinyGPT):
    """Counts weights, a frozen block, a counter in a buffer, and a hook of the user's."""

    def __init__(self) -> None:
        super().__init__(num_layers=2)
        self.register_buffer("num_steps", torch.zeros(()))
        self.blocks[0].requires_grad_(False)
        self.num_calls = 0
        self.parts = [*self.parameters()], {"first": self.blocks[0].norm1.weight}
        self.norm.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_calls += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_steps += 1

    def has_its_parts(self) -> bool:
        """Whether what it keeps of its parameters in containers are these."""
        every, by_name = self.parts
        return all(map(is_, every, self.parameters())) and by_name["first"] is self.blocks[0].norm1.weight

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("test_loss", nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), sync_dist=True)


def _trainer(layout: Layout | None, **settings: Any) -> L.Trainer:
    strategy, devices = ("auto", 1) if layout is None else (layout.strategy(), layout.world_size)
    return L.Trainer(strategy=strategy, devices=devices, enable_checkpointing=False, **{**QUIET, **settings})


def _data(layout: Layout | None) -> tuple[Any, Any]:
    dp = 1 if layout is None else layout.dp
    train = training_loader(tokens(16), global_batch_size=8, data_parallel_size=dp)
    return train, loader(tokens(16, seed=1), global_batch_size=8, data_parallel_size=dp)


Outcome = tuple[list[dict[str, Tensor]], list[float], list[str]]


def _in_turn(layouts: tuple[Layout | None, Layout | None]) -> Outcome:
    """Fit with one Trainer, then fit and test with another, then go on with the first."""
    L.seed_everything(1, verbose=False)
    module = Counts()
    inner, names = module.blocks, [name for name, _ in module.named_parameters(remove_duplicate=False)]
    losses, states = [], []
    trainers = [_trainer(layout, max_epochs=1) for layout in layouts]
    for trainer, layout in zip(trainers, layouts, strict=True):
        train, test = _data(layout)
        trainer.fit(module, train)
        assert module.has_its_parts()
        with nullcontext() if layout is None else trainer.strategy.summon_full_params():
            assert module.has_its_parts()
        assert module.has_its_parts()
        states.append(whole_state(trainer))
        losses.append(trainer.test(module, test, verbose=False)[0]["test_loss"])
    train, test = _data(layouts[0])
    losses.append(trainers[0].test(module, test, verbose=False)[0]["test_loss"])
    trainers[0].fit_loop.max_epochs = 2
    trainers[0].fit(module, train)
    states.append(whole_state(trainers[0]))
    assert module.blocks is inner
    assert module.head.weight is module.tokens.weight
    return states, losses, [n for n, _ in module.named_parameters(remove_duplicate=False) if n in names]


@pytest.fixture(scope="module")
def in_turn(workers: WorkerPools) -> Outcome:
    """Of one process."""
    return workers(1).run(_in_turn, (None, None))[0]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_several_trainers_train_one_model(workers: WorkerPools, in_turn: Outcome, names: tuple[str, str]) -> None:
    states, losses, fqns = in_turn
    for found, of_rank, own_fqns in workers(2).run(_in_turn, tuple(LAYOUTS[name] for name in names)):
        for state, expected in zip(found, states, strict=True):
            assert_same_state([state], expected)
        assert of_rank == pytest.approx(losses, abs=1e-5)
        assert own_fqns == fqns


def _several_models(layout: Layout | None) -> tuple[list[dict[str, Tensor]], list[float], bool]:
    """One Trainer fits a model, again with another block and parameter, tests another model, and fits that."""
    L.seed_everything(1, verbose=False)
    first, second, other = Counts(), Counts(), TinyGPT(num_layers=2)
    trainer = _trainer(layout, max_epochs=1)
    train, test = _data(layout)
    trainer.fit(first, train)
    states, strategy = [whole_state(trainer)], trainer.strategy
    blocks = strategy.plan.blocks if isinstance(strategy, ThreeDStrategy) else None
    losses = [trainer.test(first, test, verbose=False)[0]["test_loss"]]
    is_kept = not isinstance(strategy, ThreeDStrategy) or strategy.plan.blocks is blocks
    first.blocks[1], first.positions.weight = other.blocks[1], other.positions.weight
    for epochs, model in ((2, first), (3, second)):
        trainer.fit_loop.max_epochs = epochs
        losses += [trainer.test(each, test, verbose=False)[0]["test_loss"] for each in (second, first) if epochs == 3]
        trainer.fit(model, train)
        states.append(whole_state(trainer))
    losses.append(trainer.test(first, test, verbose=False)[0]["test_loss"])
    return states, losses, is_kept


@pytest.mark.parametrize("name", ["zero3", "pp2", "tp2"])
def test_one_trainer_trains_several_models_and_lays_out_anew_what_was_changed(workers: WorkerPools, name: str) -> None:
    states, losses, _ = workers(1).run(_several_models, None)[0]
    for found, of_rank, is_kept in workers(2).run(_several_models, LAYOUTS[name]):
        assert is_kept
        for state, expected in zip(found, states, strict=True):
            assert_same_state([state], expected)
        assert of_rank == pytest.approx(losses, abs=1e-5)
