"""Steps that are hard on stage 3: several backwards and optimizers, what is frozen or unused, validation in between."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.models import TinyMLP, features, loader, training_loader
from tests.parity import (
    QUIET,
    Layout,
    assert_same_state,
    fitted,
    whole_state,
)
from tests.workers import WorkerError, WorkerPools


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
