"""Initial weights: those of one process, which rank 0 builds and sends, and which no other rank holds whole."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import PlanError, ThreeDStrategy
from lightning_3d.model.initial_weights import check_same_model, place_buffers, place_weights
from lightning_3d.model.unbuilt import UnbuiltTensor, building
from tests.models import TinyGPT, tokens
from tests.parity import QUIET
from tests.workers import WorkerPools

CPU = torch.device("cpu")
N = 130
"""N x N floats are large enough to be built on rank 0 alone."""

Build = Callable[[], nn.Module]


# ---- construction code of many kinds


def _module(**members: Tensor | nn.Module) -> nn.Module:
    module = nn.Module()
    for name, value in members.items():
        setattr(module, name, value if isinstance(value, nn.Module) else nn.Parameter(value))
    return module


def torch_init() -> nn.Module:
    """Every initialisation of torch.nn.init, on parameters."""
    names = (
        "uniform normal trunc_normal ones zeros eye xavier_uniform xavier_normal kaiming_uniform kaiming_normal"
        " orthogonal"
    )
    module = _module(**{name: torch.empty(N, N + 10) for name in names.split()})
    for name in names.split():
        getattr(nn.init, f"{name}_")(getattr(module, name))
    module.sparse, module.narrow = nn.Parameter(torch.empty(N, N)), nn.Parameter(torch.empty(N, N))
    nn.init.sparse_(module.sparse, 0.1)
    nn.init.trunc_normal_(module.narrow, std=0.02, a=-0.01, b=0.01)
    module.dirac = nn.Parameter(torch.empty(32, 32, 5))
    nn.init.dirac_(module.dirac)
    return module


def applied() -> nn.Module:
    """A second initialisation by apply, and a third that depends on depth."""

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            nn.init.zeros_(module.bias)

    module = nn.Sequential(*(nn.Linear(N, N) for _ in range(4)))
    module.apply(init)
    for depth, layer in enumerate(module):
        with torch.no_grad():
            layer.weight.div_(math.sqrt(2 * (depth + 1)))
    return module


def dependent() -> nn.Module:
    """Weights that depend on other weights, large ones and small ones, ties, and copies."""
    first, second, third, fourth = (nn.Linear(N, N) for _ in range(4))
    with torch.no_grad():
        second.weight.copy_(first.weight)
        second.weight[:5].zero_()
        third.weight.mul_(second.weight.std() / first.weight.abs().max())
        third.weight.t().add_(first.weight)
        third.bias.copy_(first.weight.mean(0))
        second.bias[3:7] = first.weight[0, 3:7]
        torch.mv(first.weight, second.bias, out=fourth.bias)
        first.weight.normal_()  # changed after it was used
        fourth.load_state_dict(third.state_dict())
        fourth.weight.clamp_(min=-0.01)
    third.weight = nn.Parameter(first.weight)
    return _module(first=first, second=second, third=third, fourth=fourth, tied=fourth, taught=copy.deepcopy(first))


def layers_of_torch() -> nn.Module:
    """Layers that copy each other, or that do more than draw."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    return _module(
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        lstm=nn.LSTM(64, 64, num_layers=2, bidirectional=True),
        table=nn.Embedding(300, 64, padding_idx=7),
        conv=nn.Conv2d(32, 64, 3).to(memory_format=torch.channels_last),
        half=nn.Linear(N, N).to(torch.bfloat16),
        experts=nn.ParameterList(torch.randn(N, N) for _ in range(2)),
    )


class Buffers(nn.Module):
    """Buffers, also of parameters, a plain attribute, a view and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(N, N).tril().bool())
        self.register_buffer("noise", torch.randn(N, N), persistent=False)
        self.plain = torch.randn(N, N)
        self.copied = copy.deepcopy(self.plain)
        self.weight = nn.Parameter(torch.randn(N, N), requires_grad=False)
        self.weight.kind = "frozen"
        self.register_buffer("norms", self.weight.norm(dim=0))
        self.register_buffer("mean", torch.zeros(N))
        self.mean.copy_(self.weight.mean(0))
        self.top = self.weight[:3]


BUILDS: dict[str, Build] = {
    "torch.nn.init": torch_init,
    "applied": applied,
    "dependent": dependent,
    "layers of torch": layers_of_torch,
    "buffers": Buffers,
}


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def _drawn_next() -> tuple[Any, ...]:
    return torch.rand(3).tolist(), np.random.rand(), random.random()


def _assert_same(expected: nn.Module, actual: nn.Module) -> None:
    wanted, got = _tensors(expected), _tensors(actual)
    assert wanted.keys() == got.keys()
    for fqn, tensor in got.items():
        assert type(tensor) is type(wanted[fqn]), fqn
        assert torch.equal(tensor, wanted[fqn]), fqn
        assert tensor.stride() == wanted[fqn].stride(), fqn
        assert tensor.requires_grad == wanted[fqn].requires_grad, fqn
    assert len({id(tensor) for tensor in got.values()}) == len({id(tensor) for tensor in wanted.values()})


def _built(kind: str) -> None:
    rank = dist.get_rank()
    L.seed_everything(0, verbose=False)
    expected, drawn = BUILDS[kind](), None
    drawn = _drawn_next()
    L.seed_everything(0, verbose=False)
    with building(is_first=rank == 0):
        actual = BUILDS[kind]()
    assert _drawn_next() == drawn, "construction left other random states"
    large = [p for p in actual.parameters() if p.nbytes > 2**14]
    assert large
    assert all(isinstance(parameter, UnbuiltTensor) == (rank > 0) for parameter in large)
    check_same_model(actual, is_restored=False)
    place_buffers(actual, CPU)
    place_weights(actual, lambda fqn: True, CPU)
    _assert_same(expected, actual)


@pytest.mark.parametrize("kind", BUILDS)
def test_weights_are_those_of_one_process(workers: WorkerPools, kind: str) -> None:
    workers(2).run(_built, kind)


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda weight: weight.std().item(),
    "__bool__": lambda weight: bool((weight > 0).any()),
    "numpy": lambda weight: weight.detach().numpy(),
}


@pytest.mark.parametrize("name", READS)
def test_code_that_needs_values_raises(name: str) -> None:
    with building(is_first=False):
        layer = nn.Linear(N, N)
        with pytest.raises(PlanError, match=r"needs the values of Linear.weight, .* build the model before, as in"):
            READS[name](layer.weight)
    assert nn.Linear(N, N).weight.std().item() > 0


# ---- in a pipeline


class _Weights(L.Callback):
    """Collects this rank's weights when the model has been set up."""

    held: dict[str, Tensor]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held = {fqn: tensor.detach().clone() for fqn, tensor in _tensors(pl_module).items() if not tensor.is_meta}
        assert not any(isinstance(tensor, UnbuiltTensor) for tensor in _tensors(pl_module).values())


class Late(L.LightningModule):
    """Builds another module in configure_model."""

    def __init__(self, build: Callable[[], L.LightningModule]) -> None:
        super().__init__()
        self.build, self.inner = build, None

    def configure_model(self) -> None:
        if self.inner is None:
            self.inner = self.build()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.inner is not None
        return self.inner(batch[0]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


BUILD = partial(TinyGPT, width=64, vocabulary=100)


def _held(where: Literal["configure_model", "init_module"]) -> Any:
    weights, strategy = _Weights(), ThreeDStrategy(pipeline_parallel_size=2)
    settings: dict[str, Any] = {**QUIET, "devices": 2, "max_steps": 1, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=strategy, callbacks=[weights], **settings)
    torch.manual_seed(3 + torch.distributed.get_rank())
    with trainer.init_module() if where == "init_module" else nullcontext():
        model = Late(BUILD)
        if where == "init_module":
            model.configure_model()
    trainer.fit(model, DataLoader(tokens(8), batch_size=4))
    return weights.held


@pytest.mark.parametrize("where", ["configure_model", "init_module"])
def test_without_a_seed_all_ranks_take_the_weights_of_rank_0(workers: WorkerPools, where: str) -> None:
    torch.manual_seed(3)
    model = Late(BUILD)
    model.configure_model()
    expected = _tensors(model)
    ranks = workers(2).run(_held, where)
    assert set().union(*ranks) == expected.keys()
    for rank in ranks:
        for fqn, tensor in rank.items():
            assert torch.equal(tensor, expected[fqn]), fqn
