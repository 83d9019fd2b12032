"""Code around recomputed blocks that changes them between forward and backward: the backward finds the forward's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_3d.errors import StepError
from tests.models import Regression, features
from tests.parity import Layout, fitted
from tests.workers import WorkerPools

WIDTH = 8


class Part(nn.Module):
    """What others change: submodules, attributes, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)
        self.function: Callable[[Tensor], Tensor] = torch.tanh
        self.register_buffer("gate", torch.ones(WIDTH))
        self.register_buffer("table", torch.ones(256, 128))  # of more than 64 KiB

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.function(self.inner(x) * self.gate * self.table.mean())
        q = hidden.view(-1, 1, 2, WIDTH // 2)
        attended = F.scaled_dot_product_attention(q, q, q).view_as(x)
        return x + self.outer(self.dropout(attended).sin())


@contextmanager
def _set(part: nn.Module, **attributes: Any) -> Iterator[None]:
    before = {name: getattr(part, name) for name in attributes}
    for name, value in attributes.items():
        setattr(part, name, value)
    yield
    for name, value in before.items():
        setattr(part, name, value)


@contextmanager
def _evaluating(part: Part) -> Iterator[None]:
    was_training = part.training
    part.eval()
    yield
    part.train(was_training)


@contextmanager
def _hooked(part: Part) -> Iterator[None]:
    hooks = (
        part.inner.register_forward_pre_hook(lambda module, args: (args[0] * 0.3,)),
        part.inner.register_forward_hook(lambda module, args, kwargs, output: output + 0.5, with_kwargs=True),
    )
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def _with_another_weight(part: Part) -> Iterator[None]:
    weight = part.inner.weight
    del part.inner.weight
    part.inner.weight = weight * 0.5
    yield
    del part.inner.weight
    part.inner.weight = weight


HABITS: dict[str, Callable[[Part, nn.Module], AbstractContextManager[Any]]] = {
    "a rate": lambda part, adapter: _set(part.dropout, p=0.7),
    "a function": lambda part, adapter: _set(part, function=torch.exp),
    "a flag": lambda part, adapter: _evaluating(part),
    "an adapter": lambda part, adapter: _set(part, outer=adapter),
    "a forward": lambda part, adapter: _set(part.inner, forward=adapter.forward),
    "hooks": lambda part, adapter: _hooked(part),
    "a weight": lambda part, adapter: _with_another_weight(part),
    "a small buffer": lambda part, adapter: _set(part, gate=torch.full((WIDTH,), 0.3)),
    "a large buffer": lambda part, adapter: _set(part, table=torch.full((256, 128), 0.3)),
    "kernels": lambda part, adapter: sdpa_kernel(SDPBackend.MATH),
}


class Changing(Regression):
    """Calls each block as it is, and changed in another way."""

    lr = 0.003

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({habit: Part() for habit in HABITS})
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for habit, block in self.blocks.items():
            assert isinstance(block, Part)
            x = torch.tanh(block(x))
            with HABITS[habit](block, self.adapter):
                x = torch.tanh(block(x))
        output: Tensor = self.head(x)
        return output


class Functional(Changing):
    """Calls all of it with other weights, which lead back to its own."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        weights = {name: weight * 0.8 for name, weight in self.named_parameters()}
        loss = F.mse_loss(functional_call(self, weights, (batch[0],)), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Vectorized(Regression):
    """Calls a block for one sample at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh())]), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.vmap(self.blocks[0])(x))
        return output


def _refused(layout: Layout, model: type[Regression]) -> str:
    with pytest.raises(StepError) as raised:
        fitted(layout, model, data=features)
    return str(raised.value)


def test_a_block_inside_of_a_transform_is_named(workers: WorkerPools) -> None:
    (error,) = workers(1).run(_refused, Layout(activations={"recompute": "full"}), Vectorized)
    assert error.startswith("blocks.0 is called inside of a transform of torch.func (vmap")
    assert "Leave the block out of activations.blocks" in error


def test_a_functional_call_is_refused_where_blocks_gather_their_own_weights(workers: WorkerPools) -> None:
    for error in workers(2).run(_refused, Layout(dp=2, zero=3), Functional):
        assert error.startswith("blocks.a rate.inner.weight is a Tensor in place of a parameter in a call of blocks.a")
        assert "zero.stage below 3" in error
