"""The copies of weights in 16 bits that ``torch.autocast`` makes and may keep for further calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def autocast_cache(*, enabled: bool) -> Iterator[None]:
    """Inside, autocast keeps the copies that it makes while autograd records, or makes a copy for each call.

    Kept copies are gone at the end: they would outlive a step of their weights.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        if enabled and not before:
            torch.clear_autocast_cache()
