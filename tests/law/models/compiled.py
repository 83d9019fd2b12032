"""Blocks that change their arguments, buffers and callers' caches: recomputation and compilers get such ones wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Regression

WIDTH = 16


class Layers(nn.Module):
    """Two layers, of which blocks are made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Changing(Layers):
    """Computes with its argument before and after it changes it."""

    def forward(self, x: Tensor) -> Tensor:
        before = torch.sin(x.clone())
        x.mul_(torch.sigmoid(self.first(x.clone()))).add_(0.5)
        return torch.tanh(self.second(x)) + before


class Quantizing(Layers):
    """Takes the nearest code of each sample, and moves codes by moving averages (van den Oord et al. 2017)."""

    codes: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(self, num_codes: int = 8) -> None:
        super().__init__()
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


class Caching(Layers):
    """Puts values into a dict and a list of its caller."""

    def forward(self, x: Tensor, *, cache: dict[str, Any], means: list[Tensor]) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        if "last" in cache:
            y = y + 0.1 * cache["last"]
        cache["last"] = y
        means.append(y.mean())
        return x + y


class Changed(Regression):
    """Blocks that change what they are given, as activations in place do, between glue that goes on with it."""

    lr = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Changing() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.inlet(x))
        for block in self.blocks:
            h = block(h) + 0.3 * h
        output: Tensor = self.head(h)
        return output


class Habits(Regression):
    """Moving averages, counters, caches of the caller, and a buffer that changes after each call."""

    lr = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.caches = nn.ModuleList(Caching() for _ in range(2))
        self.scaling = Scaling()
        self.others = nn.ModuleList([Quantizing(), Counting()])

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.inlet(x)
        cache: dict[str, Any] = {}
        means: list[Tensor] = []
        for block in self.caches:
            h = block(h, cache=cache, means=means)
        h = h + cache["last"] + means[0] + 2 * means[1]
        for block in self.others:
            h = block(h)
        for _ in range(2):
            h = self.scaling(h)
            self.scaling.scale.mul_(0.5)
        self.scaling.scale.fill_(1.0)
        output: Tensor = self.head(h)
        return output


class Counting(Layers):
    """Changes buffers in place and computes with them, before and after."""

    num: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num", torch.ones(()))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.mean.clone()
        self.num.add_(1)
        y = self.second(torch.tanh(self.first(x))) * (1 + 1 / self.num)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * y.abs().mean(0))
        output: Tensor = y / (self.mean + 0.5)
        return output


class Scaling(Layers):
    """Reads a buffer that its model changes after each call."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x + self.second(torch.tanh(self.first(x) * (1 + self.scale)))
        return output
