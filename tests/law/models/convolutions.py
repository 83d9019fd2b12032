"""Blocks of convolutions, as residual nets, diffusion models and conformers have them."""

from __future__ import annotations

import torch
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
        self.up = nn.ConvTranspose2d(8, 32, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(32, 16, 3, padding=1, groups=4)
        self.norm = nn.InstanceNorm2d(16, affine=True, track_running_stats=True)
        self.slopes = nn.PReLU(16)
        self.reflect = nn.Conv2d(16, 16, 3, padding=1, padding_mode="reflect", groups=16, bias=False)
        self.down = nn.ConvTranspose2d(16, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slopes(self.norm(self.grouped(self.up(x))))
        y = F.max_pool2d(self.reflect(y), 2) + F.adaptive_avg_pool2d(y, 4) + F.avg_pool2d(y, 2)
        y = F.interpolate(F.pad(y, (1, 1)), size=(4, 4), mode="bilinear")
        return x + self.down(y)


class GatedDepthwise(nn.Module):
    """Restormer's and NAFNet's: two parts of one convolution go through a depthwise one."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        width = 2 * channels
        self.project = nn.Conv2d(channels, 2 * width, 1)
        self.depthwise = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.out = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        values, gates = self.depthwise(self.project(x)).chunk(2, dim=1)
        return x + self.out(F.gelu(values) * gates)


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


class ScaledByTime(nn.Module):
    """A block of a diffusion U-Net whose embedding of the time scales and shifts channels."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.norm, self.time = nn.GroupNorm(4, channels), nn.Linear(8, 2 * channels)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale, shift = self.time(time)[:, :, None, None].chunk(2, dim=1)
        return x + self.conv2(F.silu(self.norm(self.conv1(x)) * (1 + scale) + shift))


class LinearAttention(nn.Module):
    """Attention over channels, by einsum, from one fused convolution."""

    def __init__(self, channels: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Conv2d(channels, 6 * channels, 1, bias=False), nn.Conv2d(2 * channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.reshape(len(t), self.num_heads, -1, t.shape[2:].numel()) for t in self.qkv(x).chunk(3, dim=1))
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
        return x + self.out(torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2)).reshape(len(x), -1, *x.shape[2:]))


class OneHead(nn.Module):
    """An autoencoder's attention: as it has one head, only values are sharded."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (projection(x).flatten(2) for projection in (self.q, self.k, self.v))
        scores = torch.bmm(q.permute(0, 2, 1), k).softmax(2)
        return x + self.out(torch.bmm(v, scores.permute(0, 2, 1)).view(x.shape))


class TokenMixer(nn.Module):
    """Convolutions whose channels are the tokens, then one along them."""

    def __init__(self, length: int = 8, channels: int = 16) -> None:
        super().__init__()
        self.mix = nn.Sequential(nn.Conv1d(length, 4 * length, 1), nn.GELU(), nn.Conv1d(4 * length, length, 1))
        self.along = nn.Conv1d(channels, channels, 3, padding=1, groups=channels)
        self.up, self.down = nn.Linear(channels, 32), nn.Linear(32, channels)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        x = x + self.along(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.relu(self.up(x)))
