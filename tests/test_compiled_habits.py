"""What blocks do that torch's compilers get wrong or refuse: compiled blocks do it as eager ones."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Regression, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

WIDTH = 16

# Dynamo looks at `grad` of what it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    ),
]


class Quantizing(nn.Module):
    """Takes the nearest code of each sample, and moves codes by moving averages (van den Oord et al. 2017)."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, num_codes: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("codes", torch.randn(num_codes, WIDTH))
        self.register_buffer("counts", torch.ones(num_codes))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        nearest = torch.cdist(x, self.codes).argmin(1)
        quantized = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hits = F.one_hot(nearest, len(self.codes)).to(x.dtype)
                self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hits.T @ x, alpha=0.1)
                self.codes.copy_(self.sums / self.counts[:, None])
        return torch.tanh(self.second(x + (quantized - x).detach())) + x


class Scaled(nn.Module):
    """Adds products with a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.add(x, self.first(x), alpha=0.3)
        return torch.add(x @ self.second.weight, torch.tanh(y), alpha=1.7)


class Drawing(nn.Module):
    """Draws into a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.empty(len(x), 2 * WIDTH)[:, ::2].normal_()
        return torch.tanh(self.second(torch.tanh(self.first(x)) + 0.1 * noise))


class Caching(nn.Module):
    """Puts values into a dict and a list of its caller."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, cache: dict[str, Any], means: list[Tensor]) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        if "last" in cache:
            y = y + 0.1 * cache["last"]
        cache["last"] = y
        means.append(y.mean())
        return x + y


class Net(Regression):
    lr = 0.05

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h)
        output: Tensor = self.head(h)
        return output


class CachingNet(Net):
    """The first block gets the output of a layer that might be a head, so logits that nobody has read yet."""

    def __init__(self) -> None:
        super().__init__(Caching)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inlet(x)
        cache: dict[str, Any] = {}
        means: list[Tensor] = []
        for block in self.blocks:
            h = block(h, cache=cache, means=means)
        output: Tensor = self.head(h + cache["last"]) + means[0] + 2 * means[1]
        return output


class Plain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Twice(Net):
    """Two losses and two backwards of one forward, by hand."""

    def __init__(self) -> None:
        super().__init__(Plain)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.zero_grad()
        output = self(batch[0])
        self.manual_backward(F.mse_loss(output, batch[1]), retain_graph=True)
        self.manual_backward(output.square().mean())
        optimizer.step()


class Penalised(Net):
    """A loss on gradients."""

    def __init__(self) -> None:
        super().__init__(Plain)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].detach().requires_grad_()
        output = self(inputs)
        (slope,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return F.mse_loss(output, batch[1]) + slope.square().mean()


def _trained(layout: Layout | None, model: Callable[[], L.LightningModule]) -> tuple[dict[str, Tensor], list[str]]:
    """The state, and warnings of the compiler."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fitted(layout, model, data=features)
    return whole_state(trainer), [str(w.message) for w in caught if "compile.enabled" in str(w.message)]


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "moving averages": partial(Net, Quantizing),
    "sums with factors": partial(Net, Scaled),
    "draws into views": partial(Net, Drawing),
    "two backwards": Twice,
    "caches": CachingNet,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_compiled_blocks_do_it_as_eager_ones(workers: WorkerPools, name: str, backend: Any) -> None:
    ((plain, _),) = workers(1).run(_trained, None, MODELS[name])
    ((found, told),) = workers(1).run(_trained, Layout(compile_backend=backend), MODELS[name])
    assert_same_state([found], plain)
    assert len(told) == (name == "draws into views"), told
    assert all("Drawing runs eagerly" in one and "draws random numbers into a view" in one for one in told)


def test_gradients_of_gradients_name_the_setting(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match=r"no gradients of gradients\. Set compile\.enabled=False"):
        workers(1).run(_trained, Layout(compile_backend="aot_eager"), Penalised)
