"""Steps that are hard on stage 3: several backwards and optimizers, what is frozen or unused, validation in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models import TinyMLP, features, loader, training_loader
from tests.parity import (
    QUIET,
    Job,
    Layout,
    assert_parity,
    assert_same_state,
    fitted,
    run_layout,
    run_reference,
    whole_state,
)
from tests.workers import WorkerError, WorkerPools


class Manual(TinyMLP):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=2)
        self.automatic_optimization = False
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def logged(self, loss: Tensor) -> None:
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)


class Adversarial(Manual):
    """Two optimizers, and a critic that the generator's backward goes through; the critic is clamped."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.margin = nn.Parameter(torch.ones(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        generator, critic = self.optimizers()  # type: ignore[attr-defined]
        inputs, targets = batch
        self.toggle_optimizer(critic)
        loss = F.softplus(self.critic(self(inputs).detach())).mean() + F.softplus(-self.critic(targets)).mean()
        self.manual_backward(loss + self.margin.square().sum())
        self.clip_gradients(critic, gradient_clip_val=0.5)
        critic.step()
        critic.zero_grad()
        self.untoggle_optimizer(critic)
        with torch.no_grad():
            for parameter in self.critic.parameters():
                parameter.data.clamp_(-0.3, 0.3)
        self.toggle_optimizer(generator)
        loss = F.softplus(-self.critic(self(inputs))).mean() + F.mse_loss(self(inputs), targets)
        loss = loss + self.scale.square().mean() * self.margin.detach().square().sum()
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        self.logged(loss)

    def configure_optimizers(self) -> Any:
        own = [*self.layers.parameters(), self.scale]
        critic = [*self.critic.parameters(), self.margin]
        return [torch.optim.SGD(own, lr=0.05), torch.optim.Adam(critic, lr=1e-3, eps=1e-3)]


class BackwardTwice(Manual):
    """Two backwards through parts of one graph, and every other step two batches' gradients."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        output = self(batch[0])
        loss, other = F.mse_loss(output, batch[1]), output.square().mean()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(other + self.layers[0].weight.square().mean())  # type: ignore[operator,union-attr]
        if batch_idx % 2:
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        self.logged(loss)


class StepsAndRunsAgain(Manual):
    """Computes with the new parameters in the same step."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            loss = F.mse_loss(self(batch[0]), batch[1]) + self.layers[1][0].weight.square().mean()  # type: ignore[index,operator,union-attr]
            self.manual_backward(loss)
            optimizer.step()  # type: ignore[union-attr]
            optimizer.zero_grad()  # type: ignore[union-attr]
        with torch.no_grad():
            loss = F.mse_loss(self(batch[0]), batch[1])
        self.logged(loss)


class Freezes(TinyMLP):
    """A frozen layer, one that is never used, one that comes in later, and one that is frozen later."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=3)
        self.layers[1].requires_grad_(False)  # type: ignore[union-attr]
        self.unused, self.late = nn.Linear(8, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.late(y) if self.global_step > 1 else y  # type: ignore[no-any-return]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.layers[2].requires_grad_(batch_idx < 2)  # type: ignore[union-attr]
        self.layers[1].requires_grad_(batch_idx > 2)  # type: ignore[union-attr]


class ChangesItself(TinyMLP):
    """A block, and glue after the forward, change weights in place."""

    class _Normed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.div_(self.weight.norm(dim=1, keepdim=True).clamp(min=1.0))
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=1)
        self.layers.append(self._Normed(4, 4))
        self.scale = nn.Parameter(torch.ones(3))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) + self.scale.sum()
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.2, 0.2)  # type: ignore[operator,union-attr]
            self.scale.mul_(0.9)
        return loss + self.scale[0]


class Penalised(TinyMLP):
    """A penalty on its gradients, with a graph behind them in every other step."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=1)
        self.mixing = nn.Parameter(torch.eye(4))
        self.num_steps = 0

    def penalised_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs = batch[0].detach().clone().requires_grad_()
        output = self(inputs) @ self.mixing
        keeps_graph = self.num_steps % 2 == 0
        (slope,) = torch.autograd.grad(output.square().sum(), inputs, create_graph=keeps_graph, retain_graph=True)
        self.num_steps += 1
        return F.mse_loss(output, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.penalised_loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class PenalisedByHand(Penalised):
    """Optimizes by hand, after two backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad()
        losses = []
        for _ in range(2):
            losses.append(self.penalised_loss(batch))
            self.manual_backward(losses[-1])
        optimizer.step()
        self.log("loss", sum(losses).detach(), on_step=True, on_epoch=True, sync_dist=True)  # type: ignore[union-attr]


MODELS: list[Callable[[], L.LightningModule]] = [
    Adversarial,
    BackwardTwice,
    StepsAndRunsAgain,
    Freezes,
    ChangesItself,
    Penalised,
    PenalisedByHand,
]


@pytest.mark.parametrize("reshards", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_unusual_steps(workers: WorkerPools, model: Callable[[], L.LightningModule], reshards: bool) -> None:
    job = Job(model=model, data=features, sees_gradients=False, num_val_batches=1, steps=6)
    layout = Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": reshards, "show_gradients": "auto"})
    assert_parity(run_reference(job), run_layout(workers, job, layout))


class _Looks(L.Callback):
    """Counts hooks, from the start of validation on, that see anything but shards."""

    def __init__(self) -> None:
        self.num_seen = self.num_gathered = 0

    def _look(self, module: L.LightningModule) -> None:
        present = [parameter for parameter in module.parameters() if not parameter.is_meta]
        self.num_seen += 1
        self.num_gathered += any(not isinstance(parameter, DTensor) for parameter in present)

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._look(pl_module)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._look(pl_module)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self._look(pl_module)


def _validated_between(strategy: Any, ranks: int, dp: int) -> tuple[dict[str, Tensor], list[float], tuple[int, int]]:
    L.seed_everything(1, verbose=False)
    looks = _Looks()
    settings: dict[str, Any] = {**QUIET, "devices": ranks, "strategy": strategy, "callbacks": [looks]}
    trainer = L.Trainer(max_epochs=1, val_check_interval=2, enable_checkpointing=False, **settings)
    model, data = TinyMLP(num_layers=2), features(48)
    validation = loader(data, global_batch_size=8, data_parallel_size=dp)
    seen = [trainer.validate(model, validation, verbose=False)[0]["val_loss"]]
    train = training_loader(data, global_batch_size=8, data_parallel_size=dp)
    trainer.fit(model, train, validation)
    seen += [trainer.validate(model, validation, verbose=False)[0]["val_loss"]]
    if ranks == 1:
        return {fqn: p.detach().clone() for fqn, p in model.named_parameters()}, seen, (0, 0)
    with trainer.strategy.summon_full_params():  # type: ignore[attr-defined]
        weights = {fqn: p.detach().clone() for fqn, p in model.named_parameters()}
    return weights, seen, (looks.num_seen, looks.num_gathered)


def _validate_between(layout: Layout) -> tuple[dict[str, Tensor], list[float], tuple[int, int]]:
    return _validated_between(layout.strategy(), layout.world_size, layout.dp)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": False, "prefetch": 2}),
        Layout(pp=2, dp=2, zero=3, num_microbatches=2),
    ],
    ids=str,
)
def test_validation_between_steps(workers: WorkerPools, layout: Layout) -> None:
    weights, losses, _ = _validated_between("auto", 1, 1)
    for trained, seen, (num_seen, num_gathered) in workers(layout.world_size).run(_validate_between, layout):
        assert (num_seen > 6, num_gathered) == (True, 0)
        assert seen == pytest.approx(losses, abs=1e-5)
        for fqn, value in weights.items():
            torch.testing.assert_close(trained[fqn], value, atol=1e-5, rtol=0)


class _Fails(nn.Linear):
    """Fails in its second call, after it was gathered."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.num_calls == 2:
            raise ValueError("out of range")
        return super().forward(x)


class TriesAgain(TinyMLP):
    """Runs its forward once more if it fails."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=2)
        self.layers.append(_Fails(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x) * self.scale
        except ValueError:
            return super().forward(x) * self.scale


@pytest.mark.parametrize("reshards", [True, False])
def test_a_forward_that_fails_is_run_again(workers: WorkerPools, reshards: bool) -> None:
    job = Job(model=TriesAgain, data=features, num_val_batches=1)
    layout = Layout(dp=2, zero=3, zero_settings={"reshard_after_forward": reshards})
    assert_parity(run_reference(job), run_layout(workers, job, layout))


class _SetsData(L.Callback):
    """Sets `data` to what was computed from it, and to whole tensors, as pruning and orthogonal regularisers do.

    Args:
        transposes: Whether it does so to another shape.
    """

    def __init__(self, transposes: bool = False) -> None:
        self.transposes = transposes

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data = parameter.data * 0.9
        pl_module.scale.data = torch.full((3,), 0.5)
        first = pl_module.layers[0].weight
        first.data = torch.arange(first.numel()).view(first.shape).div(first.numel())
        if self.transposes:
            first.data = torch.ones(first.shape[::-1])


class Scaled(TinyMLP):
    """A parameter with fewer rows than ranks have places for."""

    def __init__(self) -> None:
        super().__init__(width=16, num_layers=1)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale.sum()


def _set_data(layout: Layout | None, *transposes: bool) -> dict[str, Tensor]:
    return whole_state(fitted(layout, Scaled, data=features, callbacks=[_SetsData(*transposes)])[0])


def test_data_of_parameters_is_set(workers: WorkerPools) -> None:
    layout = Layout(dp=2, zero=3)
    assert_same_state(workers(2).run(_set_data, layout), _set_data(None))
    with pytest.raises(
        WorkerError, match=r"StepError: layers.0.weight.data was set to a tensor of shape \(8, 16\)"
    ) as e:
        workers(2).run(_set_data, layout, True)
    assert e.value.failures.keys() == {0, 1}
