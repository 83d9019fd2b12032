"""Tensors of a checkpoint that are made, read or gathered, when a file is written, one after another.

They stand in the checkpoint as `LazyTensor`; for torch.save they become tensors without content, each at an address of
its own that nothing lies at. When the file comes to one, it is made. On rank 0 of a run that is a collective, to which
rank 0 calls the other ranks, which serve until there are no more:

    rank 0    write | "3" | gather | write | "4" | gather | write ... end of file | None
    others            "3" | gather |         "4" | gather |                         None
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage

from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.checkpoint.gathering import Gathering, of_its_own
from lightning_3d.checkpoint.own_state import Key
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.stored_file import save_from

_ALIGNMENT = 64
"""Bytes; that of torch's own storages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LazyTensor:
    """One tensor; tied names have the same object."""

    info: TensorInfo
    make: Callable[[], Tensor]
    """Gives the whole tensor, on the CPU."""

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.info.shape).numel() * self.info.dtype.itemsize


def save_lazily(value: Mapping[str, Any], file: BinaryIO) -> None:
    """Write a file as torch.save does, with one of the `LazyTensor` in ``value`` in memory at a time."""
    lazy = dict.fromkeys(leaf for leaf in tree_leaves(dict(value)) if isinstance(leaf, LazyTensor))
    addresses = _Addresses(sum(_aligned(leaf.num_bytes) for leaf in lazy))
    places = {leaf: addresses.take(leaf.info) for leaf in lazy}
    at = {place.data_ptr(): leaf for leaf, place in places.items() if place.numel()}
    largest, freed = max((leaf.num_bytes for leaf in lazy), default=0), 0

    def content(storage: UntypedStorage) -> UntypedStorage:
        nonlocal freed
        if (leaf := at.get(storage.data_ptr())) is None:
            return storage
        if freed >= largest:
            _return_freed_memory()
            freed = 0
        freed += leaf.num_bytes
        return of_its_own(leaf.make().contiguous()).untyped_storage()

    save_from(tree_map_only(LazyTensor, places.__getitem__, dict(value)), file, content)


class LateValues:
    """Values to gather for one file; all ranks call its methods alike."""

    def __init__(self) -> None:
        self._gatherings: list[Gathering[Any]] = []

    def gathered(self, own: Mapping[Key, Any]) -> dict[Key, Any]:
        """A `Gather`, whose tensors are lazy, but for those that rank 0 has as they are."""
        gathering, number = Gathering(own), len(self._gatherings)
        self._gatherings.append(gathering)
        if dist.get_rank() != 0:
            return {}
        return {
            key: gathering.value(key)
            if gathering.is_at_hand(key)
            else LazyTensor(info=info, make=partial(self._made, (number, key)))
            for key, info in gathering.found.items()
        }

    def write(self, act: Callable[[], None]) -> None:
        """Let rank 0 write a checkpoint with what came of `gathered`; a collective of all ranks."""
        if dist.get_rank() == 0:
            try:
                act()
            finally:
                _announced(None)
            return
        while (place := _announced(None)) is not None:
            self._value(place)

    def _made(self, place: tuple[int, Any]) -> Any:
        return self._value(_announced(place))

    def _value(self, place: Any) -> Any:
        number, key = place
        return self._gatherings[number].value(key)


class _Addresses:
    """Addresses that nothing lies at, which cost no memory: tensors there have a shape, a dtype and an identity."""

    def __init__(self, size: int) -> None:
        self._mapping = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ)
        self._taken = 0

    def take(self, info: TensorInfo) -> Tensor:
        """A tensor, which may not be written to."""
        count = torch.Size(info.shape).numel()
        if count == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        start, self._taken = self._taken, self._taken + _aligned(count * info.dtype.itemsize)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            flat = torch.frombuffer(self._mapping, dtype=info.dtype, count=count, offset=start)
        return flat.view(info.shape)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _return_freed_memory() -> None:
    """Have malloc give to the system what was freed, which glibc keeps in pieces that the next tensor may not fit."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _announced(place: tuple[int, Any] | None) -> Any:
    """The value that rank 0 says is the next, on all ranks."""
    said = [place]
    dist.broadcast_object_list(said, src=0)
    return said[0]
