"""The store that made the default process group, which torch keeps private."""

from __future__ import annotations

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.distributed_c10d import _get_default_store


def further_store(name: str) -> Store:
    """A client of its own of the default process group's store, with names of its own.

    Args:
        name: Goes before each name.
    """
    return PrefixStore(name, _get_default_store().clone())  # type: ignore[attr-defined]  # not in its stub
