"""Torch's profiler: names in its profiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler
from torch.profiler import record_function


def named(name: str, *further: object) -> AbstractContextManager[object]:
    """Name the code inside, by this and what follows it, in torch's profile, if one is made."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return record_function(" ".join(map(str, (name, *further))))
