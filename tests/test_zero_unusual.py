"""Optimizers, models and steps that plain ZeRO once trained wrongly, or hung on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader
from tests.optimizers import DecayingFirst, Derived, FlatStep, Listing, OwnState
from tests.parity import (
    QUIET,
    Job,
    Layout,
    ReferenceRun,
    assert_parity,
    assert_same_state,
    fitted,
    run_layout,
    run_reference,
    whole_state,
)
from tests.workers import WorkerError, WorkerPools

Stage = Literal[0, 1, 2]

# ---- optimizers


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "derived": partial(Derived, lr=0.01, eps=1e-3),
    "listing": Listing,
    "own state": OwnState,
    "decaying first": DecayingFirst,
    "flat step": FlatStep,
}


class Trained(TinyMLP):
    """Three targets, whose bias two ranks share unevenly, and a layer that nothing uses."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.layers.append(nn.Linear(4, 3))
        self.layers.append(nn.Linear(3, 4))
        self.unused = nn.Linear(8, 8)
        torch.optim.Adam([nn.Parameter(torch.ones(1))])  # gives the base class its hooks

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


@pytest.mark.parametrize("stage", [2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unusual_optimizers(workers: WorkerPools, references: dict[str, ReferenceRun], name: str, stage: Stage) -> None:
    job = Job(model=partial(Trained, name), data=features, sees_gradients=False, num_val_batches=1, steps=6)
    if name not in references:
        references[name] = run_reference(job)
    assert_parity(references[name], run_layout(workers, job, Layout(dp=2, zero=stage)), tolerance=1e-5)


class _AddsGroup(L.Callback):
    """Gives parameters to the optimizer that had gradients and no optimizer before, as fine-tuning callbacks do."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.optimizers[0].add_param_group({"params": pl_module.layers[1].parameters(), "lr": 0.1})


class PartlyOptimized(TinyMLP):
    """A layer of no optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for fqn, p in self.named_parameters() if "layers.1." not in fqn], lr=0.05)


def _add_group(layout: Layout | None) -> dict[str, Tensor]:
    return whole_state(fitted(layout, PartlyOptimized, data=features, callbacks=[_AddsGroup()])[0])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_groups_added_in_training_begin_without_gradients(workers: WorkerPools, stage: Any) -> None:
    assert_same_state(workers(2).run(_add_group, Layout(dp=2, zero=stage)), _add_group(None))


# ---- models and steps


def _fit(stage: Stage, model: Callable[[], L.LightningModule], callbacks: list[L.Callback]) -> L.LightningModule:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        strategy=ThreeDStrategy(zero={"stage": stage}),
        devices=2,
        max_epochs=2,
        callbacks=callbacks,
        enable_checkpointing=False,
        **QUIET,
    )
    module, data = model(), loader(features(32), global_batch_size=8, data_parallel_size=2)
    trainer.fit(module, data, data)
    return module


class _ReadsLate(L.Callback):
    def __init__(self) -> None:
        self.num_seen = 0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.num_seen += sum(parameter.grad is not None for parameter in pl_module.parameters())


class _AveragesInHook(TinyMLP):
    """Reads whole weights in a hook on its optimizer's step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        optimizer.register_step_post_hook(self._read)
        return optimizer

    def _read(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(parameters, self.parameters(), strict=True))
        self.seen.append(sum(float(parameter.detach().abs().sum()) for parameter in parameters))


class _Replaces(L.Callback):
    """Puts another optimizer in place of the module's, between two batches whose gradients accumulate."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            trainer.strategy.optimizers = [torch.optim.SGD(pl_module.parameters(), lr=0.5)]


def _replace(layout: Layout | None) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, TinyMLP, data=features, callbacks=[_Replaces()], accumulate_grad_batches=2)
    return whole_state(trainer)


def test_an_optimizer_that_takes_the_place_of_another_steps(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_replace, None)
    for layout in (Layout(dp=2, zero=2), Layout(dp=2, zero=1, zero_settings={"offload_optimizer": "cpu"})):
        assert_same_state(workers(2).run(_replace, layout), expected)


def _read_by_lambda(stage: Stage) -> bool:
    seen: list[bool] = []

    def look(trainer: Any, pl_module: Any, optimizer: Any) -> None:
        seen.extend(parameter.grad is not None for parameter in pl_module.parameters())

    _fit(stage, TinyMLP, [LambdaCallback(on_before_optimizer_step=look)])
    return bool(seen) and all(seen)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_lambda_callbacks_see_gradients(workers: WorkerPools, stage: Stage) -> None:
    assert workers(2).run(_read_by_lambda, stage) == [True, True]


def _read_late(stage: Stage) -> int:
    late = _ReadsLate()
    module = _fit(stage, TinyMLP, [late])
    return late.num_seen - 8 * len(list(module.parameters()))


def _read_in_hook(stage: Stage) -> list[float]:
    module = _fit(stage, _AveragesInHook, [])
    assert isinstance(module, _AveragesInHook)
    return module.seen


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_and_weights_are_whole_after_the_step(workers: WorkerPools, stage: Stage) -> None:
    assert workers(2).run(_read_late, stage) == [0, 0]
    first, second = workers(2).run(_read_in_hook, stage)
    assert first == second
    assert len(first) == 8


class SkipsErrors(TinyMLP):
    """Goes on after a backward that fails."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            if self.global_step == 1:
                self.layers[0].weight.register_hook(_fail)  # type: ignore[union-attr]
            super().backward(loss, *args, **kwargs)
        except ValueError:
            pass


def _fail(gradient: Tensor) -> Tensor:
    raise ValueError("out of memory")


def test_gradients_lost_in_a_failed_backward_are_told(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match="StepError: The last backward ended by an exception"):
        workers(2).run(_fit, 1, SkipsErrors, [])


def _save_and_resume(first: Stage, second: Stage) -> None:
    path = Path("flat.ckpt")
    for stage, resumed in ((first, None), (second, path)):
        trainer = L.Trainer(
            strategy=ThreeDStrategy(zero={"stage": stage}, save_distributed_checkpoint=False),
            devices=2,
            max_epochs=1 if resumed is None else 2,
            enable_checkpointing=False,
            **QUIET,
        )
        data = loader(features(32), global_batch_size=8, data_parallel_size=2)
        trainer.fit(Trained("flat step"), data, data, ckpt_path=resumed)
        trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        assert all(values["step"].tolist() == [8.0] for values in saved.values())
        assert {tuple(values["average"].shape) for values in saved.values()} >= {(3,), (3, 4), (32, 8)}


@pytest.mark.parametrize(("first", "second"), [(0, 2), (2, 1)])
def test_states_of_one_element_are_saved(workers: WorkerPools, first: Stage, second: Stage) -> None:
    workers(2).run(_save_and_resume, first, second)
