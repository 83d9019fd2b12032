"""Initial weights: those of one process, whatever the construction code does and whichever rank computes them."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy
from lightning_3d.model.deferred import DeferredTensor, defer_init, recording
from tests.models import TinyGPT, tokens
from tests.parity import QUIET
from tests.workers import WorkerPools

CPU = torch.device("cpu")
N = 130
"""N x N floats are large enough not to be recorded by value."""

Build = Callable[[], nn.Module]


# ---- construction code of many kinds


def _module(**tensors: Tensor | nn.Module) -> nn.Module:
    module = nn.Module()
    for name, value in tensors.items():
        setattr(module, name, value if isinstance(value, nn.Module) else nn.Parameter(value))
    return module


def torch_init() -> nn.Module:
    """Every initialisation of torch.nn.init."""
    names = (
        "uniform normal trunc_normal ones eye xavier_uniform xavier_normal kaiming_uniform kaiming_normal orthogonal"
    )
    module = _module(**{name: getattr(nn.init, f"{name}_")(torch.empty(N, N + 10)) for name in names.split()})
    module.sparse = nn.Parameter(nn.init.sparse_(torch.empty(N, N), 0.1))
    module.dirac = nn.Parameter(nn.init.dirac_(torch.empty(32, 32, 5)))
    module.narrow = nn.Parameter(nn.init.trunc_normal_(torch.empty(N, N), std=0.02, a=-0.01, b=0.01))
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
    """Weights that depend on other weights and on what was read from them."""
    first, second, third, fourth = (nn.Linear(N, N) for _ in range(4))
    with torch.no_grad():
        second.weight.copy_(first.weight)
        second.weight[:5].zero_()
        third.weight.mul_(second.weight.std() / first.weight.abs().max().item())
        third.weight.t().add_(first.weight)
        first.weight.normal_()  # changed after it was used
        fourth.load_state_dict(third.state_dict())
        fourth.weight.clamp_(min=float(first.weight.flatten()[:100].tolist()[7]))
    return _module(first=first, second=second, third=third, fourth=fourth, tied=fourth, taught=copy.deepcopy(first))


def power_iteration() -> nn.Module:
    """Parametrisations, new and old, which compute while they are registered."""
    return _module(
        spectral=nn.utils.parametrizations.spectral_norm(nn.Linear(N, N)),
        weight=nn.utils.parametrizations.weight_norm(nn.Linear(N, N)),
        orthogonal=nn.utils.parametrizations.orthogonal(nn.Linear(N, N)),
        old=nn.utils.spectral_norm(nn.Linear(N, N)),
    )


def drawn() -> nn.Module:
    """Other ways to draw: rows in a loop, permutations, own generators, other dtypes."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.empty(N, N, dtype=torch.float64)
    for row in rows:
        row.exponential_()
    own = [torch.randn(N, N, generator=generator) for _ in range(2)]
    return _module(
        rows=rows,
        permutation=torch.randperm(N * N).float(),
        choice=torch.multinomial(torch.rand(N * N), 5000).float(),
        first_own=own[0],
        second_own=own[1],
        brain=torch.rand(N, N, dtype=torch.bfloat16),
        joined=torch.stack([torch.full((N,), float(i)) for i in range(N)]),
        step=torch.log(torch.expm1(torch.rand(N * N).clamp(min=1e-4))),
        uneven=torch.randn(N, 2 * N)[:, ::2].bernoulli_(0.3),
    )


def from_elsewhere() -> nn.Module:
    """Values that can't be computed again: numpy's, and what may be changed through shared memory."""
    values = np.arange(N * N, dtype=np.float32).reshape(N, N)
    layer = nn.Linear(N, N)
    shared = torch.randn(N, N)
    alias = shared.numpy()
    with torch.no_grad():
        layer.weight.add_(torch.from_numpy(values))
    alias[0] = 5.0
    values[:] = 0.0
    buffer = io.BytesIO()
    saved = torch.randn(N, N)
    torch.save(saved, buffer)
    buffer.seek(0)
    return _module(layer=layer, shared=shared, saved=saved, loaded=torch.load(buffer))


class Buffers(nn.Module):
    """Buffers, a plain attribute, a view and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(N, N).tril().bool())
        self.register_buffer("noise", torch.randn(N, N), persistent=False)
        self.plain = torch.randn(N, N)
        self.copied = copy.deepcopy(self.plain)
        self.weight = nn.Parameter(torch.randn(N, N), requires_grad=False)
        self.weight.kind = "frozen"
        self.top = self.weight[:3]


BUILDS: dict[str, Build] = {
    "torch.nn.init": torch_init,
    "applied": applied,
    "dependent": dependent,
    "power iteration": power_iteration,
    "drawn": drawn,
    "from elsewhere": from_elsewhere,
    "buffers": Buffers,
}


# ---- in one process


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return dict(named)


def _data(tensor: Tensor) -> Tensor:
    return tensor.computed() if isinstance(tensor, DeferredTensor) else tensor


def _build_deferred(build: Build, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    with defer_init(CPU):
        return build()


def _build(build: Build, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def _assert_same(expected: nn.Module, actual: nn.Module) -> None:
    wanted, got = _tensors(expected), _tensors(actual)
    assert wanted.keys() == got.keys()
    for fqn, tensor in got.items():
        assert torch.equal(_data(tensor), wanted[fqn]), fqn
        assert tensor.stride() == wanted[fqn].stride(), fqn
        assert tensor.requires_grad == wanted[fqn].requires_grad, fqn
        assert isinstance(tensor, nn.Parameter) == isinstance(wanted[fqn], nn.Parameter), fqn
    assert len({id(tensor) for tensor in got.values()}) == len({id(tensor) for tensor in wanted.values()})


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("working_set", [0, 2**25])
@pytest.mark.parametrize("kind", BUILDS)
def test_deferred_weights_are_those_of_plain_construction(
    kind: str, working_set: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_WORKING_SET", working_set)
    expected = _build(BUILDS[kind])
    state = torch.get_rng_state()
    actual = _build_deferred(BUILDS[kind])
    if kind in ("torch.nn.init", "applied", "dependent", "drawn"):
        large = [tensor for tensor in _tensors(actual).values() if tensor.nbytes > 2**14]
        assert large
        assert working_set == 0 or all(isinstance(t, DeferredTensor) and t.contents is not None for t in large)
    assert torch.equal(torch.get_rng_state(), state), "construction left another random state"
    _assert_same(expected, actual)
    assert torch.equal(torch.get_rng_state(), state), "computing weights drew random numbers"


def test_a_failing_initialisation_leaves_the_weights_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_WORKING_SET", 0)

    def build() -> nn.Module:
        first, second, third = (nn.Linear(N, N) for _ in range(3))
        with pytest.raises(RuntimeError, match="uniform_ expects"):
            first.weight.data.uniform_(1.0, 0.0)
        return _module(first=first, second=second, third=third)

    _assert_same(_build(build), _build_deferred(build))


def test_what_can_not_be_deferred_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_TOLD", 2**14)
    with pytest.warns(UserWarning, match="values come from files, numpy or another thread"):
        _build_deferred(lambda: _module(weight=torch.from_numpy(np.zeros((N, N), dtype=np.float32)) + 1))


# ---- in a pipeline


class _Weights(L.Callback):
    """Collects this rank's weights when the model has been set up."""

    held: dict[str, Tensor]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held = {fqn: tensor.detach().clone() for fqn, tensor in _tensors(pl_module).items() if not tensor.is_meta}
        assert not any(isinstance(tensor, DeferredTensor) for tensor in _tensors(pl_module).values())


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
