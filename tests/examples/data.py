"""Small random data, and draws that are the same in every layout."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

SEED = 1
NUM_CLASSES = 4
SIZE = 8
"""Of an image's sides."""


def images(num_samples: int, *, channels: int = 1, size: int = SIZE, seed: int = 0) -> Dataset[tuple[Tensor, ...]]:
    """``(image, class)``: (channels, size, size) float32 and an integer."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.rand(num_samples, channels, size, size, generator=generator)
    return TensorDataset(pictures, torch.arange(num_samples) % NUM_CLASSES)


def drawn(like: Tensor, *shape: int) -> Tensor:
    """Noise for each sample in place of ``torch.randn``, whose numbers are others for every rank and microbatch.

    Args:
        like: (samples, ...)
        shape: Of one sample's noise; that of `like` if there is none.

    Returns:
        (samples, *shape), about of mean 0 and deviation 1.
    """
    flat = like.detach().flatten(1).double()
    sizes = shape or tuple(like.shape[1:])
    positions = torch.arange(1, 1 + torch.Size(sizes).numel(), dtype=torch.float64)
    mixed = flat.sum(1, keepdim=True) * 12.9898 * positions + positions * 78.233
    return (mixed.sin() * 2**0.5).view(len(flat), *sizes).to(like.dtype)
