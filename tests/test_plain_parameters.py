"""Habits of DDP that rely on plain parameters, at ZeRO stages 0 to 2: user code, callbacks and optimizers."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader, reference_loader
from tests.parity import (
    Layout,
    assert_same_state,
    fitted,
    whole_state,
)
from tests.workers import WorkerError, WorkerPools

Stage = Literal[0, 1, 2, 3]
PLAIN: tuple[Stage, ...] = (0, 1, 2)
STEPS, BATCH = 4, 8

# ---- callbacks


class _Looking(L.Callback):
    """Reads parameters and gradients as plain tensors wherever it can."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.norms: list[dict[str, float]] = []

    def _look(self, module: L.LightningModule) -> None:
        total = 0.0
        for parameter in module.parameters():
            values = parameter.detach().numpy()
            assert type(values) is np.ndarray
            total += float(np.abs(values).sum())
        self.seen.append(total)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._look(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        copy.deepcopy(pl_module.layers)
        torch.save(pl_module.state_dict(), io.BytesIO())
        self._look(pl_module)


class _Norms(_Looking):
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        assert all(type(p.grad) is Tensor for p in pl_module.parameters())
        self.norms.append({name: float(value) for name, value in grad_norm(pl_module, 2).items()})


def _fit(
    strategy: Any, num_ranks: int, callbacks: list[Any], model: Callable[[], L.LightningModule] = TinyMLP
) -> tuple[L.Trainer, L.LightningModule]:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=strategy,
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = model()
    data = features(STEPS * BATCH)
    train = reference_loader(data, global_batch_size=BATCH, seed=1)
    val = loader(data, global_batch_size=BATCH)
    if num_ranks > 1:
        train, val = (loader(data, global_batch_size=BATCH, data_parallel_size=num_ranks) for _ in range(2))
    trainer.fit(module, train, val)
    return trainer, module


def _look(stage: Stage | None, callback: type[_Looking]) -> tuple[list[float], list[dict[str, float]]]:
    looking = callback()
    _fit("auto" if stage is None else ThreeDStrategy(zero={"stage": stage}), 1 if stage is None else 2, [looking])
    return looking.seen, looking.norms


@pytest.mark.parametrize(("stage", "callback"), [(0, _Norms), (1, _Looking), (2, _Norms)])
def test_callbacks_read_plain_values(workers: WorkerPools, stage: Stage, callback: type[_Looking]) -> None:
    expected, norms = _look(None, callback)
    for seen, seen_norms in workers(2).run(_look, stage, callback):
        assert seen == pytest.approx(expected, abs=1e-4)
        assert [list(step) for step in seen_norms] == [list(step) for step in norms]
        for step, expected_step in zip(seen_norms, norms, strict=True):
            assert step == pytest.approx(expected_step, abs=1e-5)


# ---- manual optimization


class Teacher(TinyMLP):
    """A frozen average of the layers that they learn from, as in BYOL."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(batch[0] + 0.1)
        output = self(batch[0])
        return F.mse_loss(output, batch[1]) + F.mse_loss(output, taught)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for learner, teacher in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
            teacher.mul_(0.9).add_(learner, alpha=0.1)


class SummonedTeacher(Teacher):
    """Averages whole weights, which lie on several stages of a pipeline."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        assert isinstance(strategy, ThreeDStrategy)
        with strategy.summon_full_params():
            super().on_train_batch_end(outputs, batch, batch_idx)


def _trained(layout: Layout | None, model: Callable[[], L.LightningModule]) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, model, data=features, batches=STEPS)
    return whole_state(trainer)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_a_momentum_teacher_on_another_stage(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(2).run(_trained, layout, SummonedTeacher), _trained(None, Teacher))


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, dp=2, zero=3)], ids=str)
def test_a_momentum_teacher_that_would_not_learn_is_refused(workers: WorkerPools, layout: Layout) -> None:
    with pytest.raises(WorkerError) as caught:
        workers(layout.world_size).run(_trained, layout, Teacher)
    for failure in caught.value.failures.values():
        assert re.search(r"StepError: add_ (changes teacher\.|needs the values of )", failure)
    assert len(caught.value.failures) == layout.world_size


# ---- after fit


def _use_after_fit(stage: Stage) -> None:
    trainer, module = _fit(ThreeDStrategy(zero={"stage": stage}), 2, [])
    first = {fqn: value.detach().clone() for fqn, value in module.state_dict().items()}
    output = module(torch.ones(2, 8))
    module.load_state_dict({fqn: torch.zeros_like(value) for fqn, value in first.items()})
    assert not module(torch.ones(2, 8)).any()
    module.load_state_dict(first)
    torch.testing.assert_close(module(torch.ones(2, 8)), output)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    module(torch.ones(2, 8)).sum().backward()  # without the other rank
    assert trainer.model is not None
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert "_arrival" not in vars(parameter)
    again, _ = _fit(ThreeDStrategy(zero={"stage": stage}), 2, [], model=lambda: module)
    assert again.state.finished


@pytest.mark.parametrize("stage", PLAIN)
def test_the_module_is_usable_after_fit(workers: WorkerPools, stage: Stage) -> None:
    workers(2).run(_use_after_fit, stage)
