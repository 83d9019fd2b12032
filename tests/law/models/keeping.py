"""What code keeps for later: products for a recomputation, tables outside of modules."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.law.models.row import Family, Model
from tests.models import Regression, features
from tests.parity import Job, Layout

WIDTH = 32
_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


def keeps_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


class KeptProducts(Regression):
    """Its residual layers run under a checkpoint of their author's that keeps matrix products.

    The widening is a layer of no block that is read first inside of the checkpoint.
    """

    def __init__(self) -> None:
        super().__init__()
        self.widening = nn.Linear(8, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)
        )
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, keeps_products)
        x = self.widening(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
        output: Tensor = self.last(x)
        return output


class Again(Regression):
    """Runs each layer once more in its backward, with weights of no block, and passes two of them as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.widening, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)
        )
        self.scale, self.mix = nn.Parameter(torch.linspace(0.5, 1, WIDTH)), nn.Parameter(0.1 * torch.eye(WIDTH))
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, WIDTH))

    def step(self, layer: nn.Module, x: Tensor, mix: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = layer(x * self.scale) + x @ mix + shift
        return result

    def forward(self, x: Tensor) -> Tensor:
        x = self.widening(x)
        for layer in self.layers:
            run = functools.partial(checkpoint, use_reentrant=True) if self.training else _run
            x = run(functools.partial(self.step, layer), x, self.mix, self.shift)
        output: Tensor = self.last(x)
        return output


def _run(function: Any, *args: Tensor) -> Any:
    return function(*args)


class Tables(nn.Module):
    """Keeps a grid in an ``lru_cache``, a mask in a class attribute and a scale in a dict of one, and reads data."""

    mask: ClassVar[Tensor | None] = None
    scales: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    @staticmethod
    @functools.lru_cache(maxsize=8)
    def grid(size: int) -> Tensor:
        return torch.linspace(-1, 1, size)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1]
        if Tables.mask is None:
            Tables.mask = torch.arange(size).remainder(3).ne(0)
        if size not in Tables.scales:
            Tables.scales[size] = torch.arange(size) / size
        y = x + self.linear(x) * self.grid(size) * Tables.mask + Tables.scales[size]
        return y if torch.isfinite(y).all() else y.clamp(-1e4, 1e4)


class KeptTables(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.widening, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(Tables() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.widening(x)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.last(x)
        return output


def _whole(layout: Layout) -> bool:
    return layout.pp == 1


def _unsharded(layout: Layout) -> bool:
    return layout.tp == 1


TP: frozenset[Family] = frozenset({"tp"})

MODELS = {
    "kept-products": Model(job=Job(model=KeptProducts, data=features, num_val_batches=1), families=TP, fits=_whole),
    "run-again": Model(
        job=Job(model=Again, data=features, num_val_batches=1),
        lr=0.05,
        families=frozenset({"pp", "dp"}),
        fits=_unsharded,  # a block whose backward is in one of a checkpoint sends there what the judge does not count
    ),
    "kept-tables": Model(job=Job(model=KeptTables, data=features, num_val_batches=1), lr=0.02),
}
