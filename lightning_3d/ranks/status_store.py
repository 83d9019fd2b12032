"""A board on which ranks leave words for each other, also while some of them wait in a collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # public, not in __all__

from lightning_3d.torch_internals.process_groups import further_store


class StatusStore:
    """Texts under names in the store that made the process groups. Nothing here waits for another rank.

    Any thread may use it. The store ends with the process that keeps it: rank 0, or the agent of torchrun.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    @classmethod
    def open(cls) -> StatusStore:
        """A new one for the next run. Every rank opens as many."""
        store = further_store("lightning_3d")
        number = store.add(f"runs/{dist.get_rank()}", 1)
        return cls(PrefixStore(str(number), store))

    def put(self, name: str, text: str) -> None:
        """Leave a text, in place of an earlier one.

        Raises:
            DistNetworkError: the store has ended, as in all of these.
        """
        self._store.set(name, text)

    def put_first(self, name: str, text: str) -> str:
        """Leave a text unless there is one; returns the one that is there."""
        there: bytes = self._store.compare_set(name, "", text)
        return there.decode()

    def append(self, name: str, text: str) -> None:
        """Add to the text, of which there may be none yet."""
        self._store.append(name, text)  # type: ignore[attr-defined]  # not in its stub

    def add(self, name: str, number: int) -> int:
        """Add to a number that all ranks share, 0 at first; returns what it is then."""
        return self._store.add(name, number)

    def get(self, name: str) -> str | None:
        """The text, if there is one."""
        return self._store.get(name).decode() if self._store.check([name]) else None

    def get_all(self, names: Iterable[str]) -> list[str] | None:
        """All the texts, once each is there."""
        names = list(names)
        return [text.decode() for text in self._store.multi_get(names)] if self._store.check(names) else None
