"""The memory that operators take while they run."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.activations.selective import is_costly
from lightning_3d.torch_internals.dispatch import TorchDispatchMode
from lightning_3d.torch_internals.pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Follows the storages that operators make inside, fake ones too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._sizes: dict[StorageWeakRef, int] = {}
        self._made: set[StorageWeakRef] = set()  # also those that are gone, whose addresses are not used again
        self.peak = 0
        """Bytes that were alive at once, at most, since `restart`."""
        self.num_cheap = 0
        """Bytes of results of operators that selective recomputation computes again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = {StorageWeakRef(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        results = func(*args, **(kwargs or {}))
        for leaf in filter(_is_tensor, tree_leaves(results)):
            storage = StorageWeakRef(leaf.untyped_storage())
            if storage in given or storage in self._made:
                continue
            self._made.add(storage)
            self._sizes[storage] = leaf.untyped_storage().nbytes()
            if not is_costly(func):
                self.num_cheap += self._sizes[storage]
        self.peak = max(self.peak, self.live)
        return results

    @property
    def live(self) -> int:
        """Bytes of those that are alive."""
        self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}
        return sum(self._sizes.values())

    def restart(self) -> int:
        """Begin to look for the peak anew; returns what is alive."""
        self.peak = self.live
        return self.peak


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)
