"""Small random data."""

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
