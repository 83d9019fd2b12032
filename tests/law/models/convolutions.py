"""Blocks of convolutions, as residual nets, diffusion models and conformers have them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """ResNet-50's block, ResNeXt's with groups."""

    def __init__(self, channels: int = 32, width: int = 16, groups: int = 1) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, width, 1)
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=groups)
        self.expand = nn.Conv2d(width, channels, 1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c) for c in (width, width, channels))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norms[0](self.reduce(x)))
        y = F.relu(self.norms[1](self.conv(y)))
        return F.relu(x + self.norms[2](self.expand(y)))


class Resampling(nn.Module):
    """Transposed convolutions, pooling, resizing, padding and norms, all on own channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(16, 32, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(32, 16, 3, padding=1, groups=4)
        self.norm = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.slopes = nn.PReLU(16)
        self.reflect = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", groups=16, bias=False)
        self.down = nn.ConvTranspose2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slopes(self.norm(self.grouped(self.up(x))))
        y = F.max_pool2d(self.reflect(y), 2) + F.adaptive_avg_pool2d(y, 4) + F.avg_pool2d(y, 2)
        y = F.interpolate(F.pad(y, (1, 1)), size=(4, 4), mode="bilinear")
        return x + self.down(y)


class Conformer(nn.Module):
    """The convolution module of a conformer."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(channels, 2 * channels, 1),
            nn.GLU(dim=1),
            nn.Conv1d(channels, channels, 3, padding=1, groups=channels),
            nn.BatchNorm1d(channels),
            nn.SiLU(),
            nn.Conv1d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x.transpose(1, 2)).transpose(1, 2)
