"""The memory that operators take while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.activations.collective_mode import CollectiveMode
from lightning_3d.activations.selective import is_costly
from lightning_3d.torch_internals.pytree import tree_leaves


class LiveBytes(CollectiveMode):
    """Follows the storages that operators make inside, fake ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        """Bytes of all that were made; references keep the addresses of those that are gone from being used again."""
        self.costly: set[StorageWeakRef] = set()
        """Results of operators and collectives that selective recomputation keeps."""
        self._used_up: set[StorageWeakRef] = set()
        self._alive: set[StorageWeakRef] = set()
        self._most = 0  # bytes alive, at most: with those freed since somebody looked
        self.peak = 0
        """Bytes that were alive at once, at most, since `restart`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        results = func(*args, **(kwargs or {}))
        for leaf in filter(_is_tensor, tree_leaves(results)):
            storage = StorageWeakRef(leaf.untyped_storage())
            if storage in given or storage in self.sizes:
                continue
            self.sizes[storage] = leaf.untyped_storage().nbytes()
            self._alive.add(storage)
            self._most += self.sizes[storage]
            if is_costly(func):
                self.costly.add(storage)
        if self._most > self.peak:  # to look takes as long as storages are many
            self.peak = max(self.peak, self.live)
        return results

    def on_collective(self, make: Callable[[], Tensor], used_up: Tensor | None) -> Tensor:
        """Note that the result is kept, and what it used up is not, nor computed again."""
        storage = None if used_up is None else StorageWeakRef(used_up.untyped_storage())
        result = make()
        if used_up is not None and storage in self.costly and self.sizes[storage] == used_up.nbytes:
            self.costly.remove(storage)
            self._used_up.add(storage)
        self.costly.add(StorageWeakRef(result.untyped_storage()))
        return result

    @property
    def alive(self) -> set[StorageWeakRef]:
        """Storages that are not freed yet."""
        self._look()
        return self._alive

    @property
    def live(self) -> int:
        """Bytes that are not freed yet."""
        self._look()
        return self._most

    def _look(self) -> None:
        freed = [storage for storage in self._alive if storage.expired()]
        self._alive.difference_update(freed)
        self._most -= sum(self.sizes[storage] for storage in freed)

    @property
    def num_cheap(self) -> int:
        """Bytes of all results that selective recomputation computes again."""
        known = self.costly | self._used_up
        return sum(size for storage, size in self.sizes.items() if storage not in known)

    def restart(self) -> int:
        """Begin to look for the peak anew; returns what is alive."""
        self.peak = self.live
        return self.peak


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
