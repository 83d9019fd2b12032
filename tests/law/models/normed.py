"""Norms in blocks and between them: all leave what they are given as it is, so that running statistics alone show."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.models import Regression

WIDTH = 8


def scaled_features(num_samples: int) -> TensorDataset:
    """Features (WIDTH,) that are neither centred nor scaled, and targets (4,)."""
    generator = torch.Generator().manual_seed(5)
    x = 2 * torch.randn(num_samples, WIDTH, generator=generator) + 1
    return TensorDataset(x, torch.randn(num_samples, 4, generator=generator))


class Reading(nn.BatchNorm1d):
    """Calls torch's function itself, and reads the statistics before it."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.running_mean is not None
        shift = self.running_mean.clone()
        if self.training:
            self.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x - shift, *statistics, training=self.training, momentum=self.momentum or 0.0)


class Norms(nn.Module):
    """A layer with norms of every kind beside it, (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm, self.cumulative = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.twice, self.twice_cumulative = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)
        self.constant = nn.BatchNorm1d(WIDTH, momentum=0.0)
        self.untracked = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        self.frozen, self.reading = nn.BatchNorm1d(WIDTH).eval(), Reading(WIDTH)
        self.images = nn.BatchNorm2d(2)
        self.instances = nn.InstanceNorm2d(2, track_running_stats=True)
        self.averaged = nn.InstanceNorm2d(2, momentum=None, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        images = x.unflatten(1, (2, 2, 2))
        seen = [norm(x) for norm in (self.norm, self.cumulative, self.constant, self.untracked, self.frozen)]
        seen += [norm(y) for norm in (self.twice, self.twice_cumulative) for y in (x, 2 * x + 1)]
        seen += [self.reading(x), *(norm(images).flatten(1) for norm in (self.images, self.instances, self.averaged))]
        return torch.tanh(self.layer(x)) + 0 * sum(seen)


class Beside(nn.Module):
    """Hands on what it is given, which a norm sees."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * self.norm(x)


class Layer(nn.Module):
    """A layer with one norm beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + 0 * self.norm(x)


class NormNet(Regression):
    """Norms in blocks and between them, in a block that is called first and last, and around the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = (nn.BatchNorm1d(WIDTH, affine=False) for _ in range(2))
        self.after = nn.BatchNorm1d(WIDTH, affine=False, momentum=None)
        self.shared = nn.Sequential(nn.Linear(WIDTH, WIDTH), Beside(nn.BatchNorm1d(WIDTH, momentum=None)))
        self.blocks = nn.ModuleList([Layer(), Norms(), Layer()])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(x + 0 * self.before(x))
        for i, block in enumerate(self.blocks):
            x = block(x)
            x = x + 0 * self.between(x) if i < 2 else x
        y: Tensor = self.head(self.shared(x))
        return y + 0 * self.after(torch.cat([y, y], -1))[:, :4]
