"""Modules with plain parameters at ZeRO stages 0 to 2 are used after fit as ever; averages of other stages' weights."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


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


def _train(layout: Layout | None) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, Teacher, data=features)
    return whole_state(trainer)


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, dp=2, zero=3)], ids=str)
def test_a_momentum_teacher_learns_from_layers_on_another_stage(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(layout.world_size).run(_train, layout), _train(None))


def _use_after_fit(layout: Layout) -> None:
    _, module = fitted(layout, TinyMLP, data=features, batches=1, epochs=1)
    first = {fqn: value.detach().clone() for fqn, value in module.state_dict().items()}
    output = module(torch.ones(2, 8))
    module.load_state_dict({fqn: torch.zeros_like(value) for fqn, value in first.items()})
    assert not module(torch.ones(2, 8)).any()
    module.load_state_dict(first)
    torch.testing.assert_close(module(torch.ones(2, 8)), output)
    torch.save(module.state_dict(), io.BytesIO())
    module(torch.ones(2, 8)).sum().backward()  # without the other rank
    for parameter in module.parameters():
        assert type(parameter) is nn.Parameter
        assert "_arrival" not in vars(parameter)
    again, _ = fitted(layout, partial(lambda same: same, module), data=features, batches=1, epochs=1)
    assert again.state.finished


def test_the_module_is_usable_after_fit(workers: WorkerPools) -> None:
    workers(2).run(_use_after_fit, Layout(dp=2, zero=2))
