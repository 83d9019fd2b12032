"""Habits of DDP that rely on plain parameters, at ZeRO stages 0 to 2: user code, callbacks and optimizers."""

from __future__ import annotations

import copy
import io
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyMLP, features, loader, reference_loader
from tests.parity import (
    Job,
    Layout,
    assert_parity,
    assert_same_state,
    fitted,
    run_layout,
    run_reference,
    whole_state,
)
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

Stage = Literal[0, 1, 2, 3]
PLAIN: tuple[Stage, ...] = (0, 1, 2)
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)
STEPS, BATCH = 4, 8

# ---- unusual models


class Odd(TinyMLP):
    """Parameters of shapes that do not divide, one that is never used, one of glue, tied ones, one used twice."""

    def __init__(self) -> None:
        super().__init__(width=7)
        self.scale = nn.Parameter(torch.ones(()))
        self.token = nn.Parameter(torch.zeros(1, 7))
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.layers[2][0].weight = self.layers[1][0].weight  # type: ignore[index,union-attr,assignment]

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.layers
        x = first(x) + self.token
        for layer in rest[:-1]:
            x = layer(x)
        x = x @ first.weight @ first.weight.T  # not through its forward
        return rest[-1](x) * self.scale + self.empty.sum()  # type: ignore[no-any-return]


class Inner(nn.Module):
    """Has another method than ``forward``, and children that others call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 4)

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x).relu()  # type: ignore[no-any-return]


class ByMethods(TinyMLP):
    """Calls methods and children of modules, and never the modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Inner())

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layers[0]
        assert isinstance(inner, Inner)
        return inner.outer(inner.encode(x))  # type: ignore[no-any-return]


class Penalised(TinyMLP):
    """A gradient penalty."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].requires_grad_()
        output = self(inputs)
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        loss = F.mse_loss(output, batch[1]) + 0.1 * gradient.square().sum(1).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Sometimes(TinyMLP):
    """A layer that only odd steps use, so that its gradient is None in the others."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 4)
        self.num_steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_steps += self.training
        output = super().forward(x)
        return output + self.extra(x) if self.num_steps % 2 else output


class Hooked(TinyMLP):
    """Gradient hooks on parameters, and attributes that users set on them."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.is_big = parameter.numel() > 100  # type: ignore[attr-defined]
        self.layers[0].weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return _OnlyBig(self.parameters(), lr=0.1)


class _OnlyBig(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if getattr(parameter, "is_big", True) and parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=group["lr"])
        return loss


class ClippedByHand(TinyMLP):
    """torch's own clipping in the hook for it."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.2)
        self.log("norm", norm, sync_dist=True)


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "odd shapes": Odd,
    "methods": ByMethods,
    "gradient penalty": Penalised,
    "sometimes unused": Sometimes,
    "hooks and attributes": Hooked,
    "clipped by hand": ClippedByHand,
}


@pytest.mark.parametrize(
    ("sees_gradients", "name", "stage"),
    some_in_matrix(
        itertools.product([True, False], MODELS, PLAIN),
        lambda sees_gradients, name, stage: sees_gradients and stage < 2,
    ),
)
def test_models_train_as_in_one_process(workers: WorkerPools, name: str, stage: Stage, sees_gradients: bool) -> None:
    sees_gradients = sees_gradients or name == "clipped by hand"
    job = Job(model=MODELS[name], data=features, sees_gradients=sees_gradients)
    assert_parity(run_reference(job), run_layout(workers, job, Layout(dp=2, zero=stage)), tolerance=1e-5)


@pytest.mark.parametrize("stage", PLAIN)
def test_three_ranks_share_odd_shapes(workers: WorkerPools, stage: Stage) -> None:
    job = Job(model=Odd, data=features, global_batch_size=9, gradient_clip_val=0.2, accumulate_grad_batches=2)
    job = replace(job, sees_gradients=False)
    assert_parity(run_reference(job), run_layout(workers, job, Layout(dp=3, zero=stage)), tolerance=1e-5)


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


@pytest.mark.parametrize("stage", PLAIN)
@pytest.mark.parametrize("callback", [_Looking, _Norms])
def test_callbacks_read_plain_values(workers: WorkerPools, stage: Stage, callback: type[_Looking]) -> None:
    expected, norms = _look(None, callback)
    for seen, seen_norms in workers(2).run(_look, stage, callback):
        assert seen == pytest.approx(expected, abs=1e-4)
        assert [list(step) for step in seen_norms] == [list(step) for step in norms]
        for step, expected_step in zip(seen_norms, norms, strict=True):
            assert step == pytest.approx(expected_step, abs=1e-5)


AVERAGING: dict[str, Callable[[], L.Callback]] = {
    "EMA": partial(EMAWeightAveraging, decay=0.5),
    "SWA": partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1),
}


def _average(stage: Stage | None, name: str) -> dict[str, Tensor]:
    strategy = "auto" if stage is None else ThreeDStrategy(zero={"stage": stage})
    _, module = _fit(strategy, 1 if stage is None else 2, [AVERAGING[name]()])
    return {fqn: value.detach().clone() for fqn, value in module.state_dict().items()}


@pytest.mark.parametrize("stage", PLAIN)
@pytest.mark.parametrize("name", AVERAGING)
def test_weights_are_averaged(workers: WorkerPools, stage: Stage, name: str) -> None:
    expected = _average(None, name)
    for averaged in workers(2).run(_average, stage, name):
        assert averaged.keys() == expected.keys()
        for fqn, value in expected.items():
            torch.testing.assert_close(averaged[fqn], value, atol=1e-5, rtol=0)


# ---- manual optimization


class Gan(L.LightningModule):
    """Two optimizers that toggle; the second step reads the gradients."""

    def __init__(self, raw: bool = False) -> None:
        super().__init__()
        self.automatic_optimization, self.raw = False, raw
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        self.critic = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        first, second = self.optimizers(use_pl_optimizer=not self.raw)  # type: ignore[attr-defined,misc]
        backward = Tensor.backward if self.raw else self.manual_backward
        noise, real = batch
        self.toggle_optimizer(first)
        loss = F.softplus(-self.critic(self.generator(noise))).mean()
        backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        fake = self.generator(noise).detach()
        for part in (F.softplus(self.critic(fake)).mean(), F.softplus(-self.critic(real)).mean()):
            backward(part)  # gradients add up
        torch.nn.utils.clip_grad_norm_(self.critic.parameters(), 0.1)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val", self.critic(self.generator(batch[0])).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), lr=0.02, eps=1e-3) for part in (self.generator, self.critic)]


class StepsInHook(TinyMLP):
    """Trains once more on each batch when the step has ended."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor | None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        self._learn(loss)
        return None

    def on_train_batch_end(self, outputs: Any, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._learn(F.l1_loss(self(batch[0]), batch[1]))

    def _learn(self, loss: Tensor) -> None:
        optimizer = self.optimizers()
        assert isinstance(optimizer, LightningOptimizer)
        optimizer.zero_grad()
        if self.automatic_optimization:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            self.manual_backward(loss)
        optimizer.step()


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


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("raw", [False, True], ids=["Lightning's", "torch's"])
def test_a_gan(workers: WorkerPools, stage: Stage, raw: bool) -> None:
    model = partial(Gan, raw)
    assert_same_state(workers(2).run(_trained, Layout(dp=2, zero=stage), model), _trained(None, model))


@pytest.mark.parametrize("stage", STAGES)
def test_backwards_and_steps_in_hooks(workers: WorkerPools, stage: Stage) -> None:
    for model in (partial(StepsInHook, False), partial(StepsInHook, True)):
        assert_same_state(workers(2).run(_trained, Layout(dp=2, zero=stage), model), _trained(None, model))


@pytest.mark.parametrize("layout", [*(Layout(dp=2, zero=stage) for stage in STAGES), Layout(tp=2)], ids=str)
def test_a_momentum_teacher(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(2).run(_trained, layout, Teacher), _trained(None, Teacher))


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
