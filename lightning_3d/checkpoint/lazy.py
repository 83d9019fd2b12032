"""Tensors of a checkpoint that are not made yet: to be gathered from other ranks, or read from files, one at a time.

torch.save gets tensors of the same size in their place, whose memory nobody touches, so that it costs nothing; when it
comes to write one, it is made.
"""

from __future__ import annotations

import ctypes
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor, UntypedStorage
from typing_extensions import override

from lightning_3d.checkpoint.box import Share, TensorInfo, fill, is_part
from lightning_3d.errors import CheckpointError
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.stored import save_from
from lightning_3d.torch_internals.tensors import contiguous_stride


@dataclass(frozen=True, kw_only=True, eq=False)
class LazyTensor:
    """One tensor; tied names have the same object."""

    info: TensorInfo
    make: Callable[[], Tensor]
    """Gives the full tensor, on the CPU."""
    read: Callable[[Share], None] | None = None
    """Fills a share of a tensor in a folder, and reads no more than that."""

    def __deepcopy__(self, memo: dict[int, object]) -> LazyTensor:
        return self

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.info.shape).numel() * self.info.dtype.itemsize


def made(tree: object) -> Any:
    """Nested containers with the full tensors in place of all `LazyTensor`."""
    known: dict[LazyTensor, Tensor] = {}

    def full(lazy: LazyTensor) -> Tensor:
        if lazy not in known:
            known[lazy] = lazy.make()
        return known[lazy]

    return tree_map_only(LazyTensor, full, tree)


class SavedState(UserDict[str, Any]):
    """A state dict of a folder as hooks that load a checkpoint see it: full values by name, read when asked for.

    Each rank reads by itself what its code asks for. Hooks may change values, which leaves the folder as it is.

    Args:
        values: Tensors, or containers of them, are lazy until somebody asks for them.
    """

    @override
    def __getitem__(self, name: str) -> object:
        value = self.data[name] = made(self.data[name])
        return value

    @override
    def copy(self) -> SavedState:
        return SavedState(self.data)


def unread(state: Mapping[str, object]) -> Mapping[str, Any]:
    """The values of a state dict as they are: lazy where nobody has asked for them."""
    return state.data if isinstance(state, SavedState) else state


def as_lazy(tree: object) -> Any:
    """Nested containers with a `LazyTensor` in place of each tensor; of tensors that are tied it is the same."""
    known: dict[object, LazyTensor] = {}

    def lazy(tensor: Tensor) -> LazyTensor:
        if tensor.layout != torch.strided:
            raise CheckpointError(f"the checkpoint holds a tensor of {tensor.layout}, which can't be exported")
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) if tensor.numel() else id(tensor)
        info = TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)
        return known.setdefault(place, LazyTensor(info=info, make=tensor.detach))

    return tree_map_only(Tensor, lazy, tree)


def info_of(value: object) -> TensorInfo | None:
    """The shape and dtype of a tensor, lazy or not; None of anything else."""
    return value.info if isinstance(value, LazyTensor) else TensorInfo.of(value)


def take(share: Share, value: Tensor | LazyTensor) -> None:
    """Fill a share from a full tensor, from the folder that has it, or from the same share of another tensor."""
    if isinstance(value, LazyTensor) and value.read is not None:
        value.read(share)
    elif is_part(given := made(value)):
        part_of(share.tensor.detach()).copy_(part_of(given))
    else:
        fill(share.tensor, given, share.parts)


def save_lazily(value: Mapping[str, object], file: BinaryIO) -> None:
    """Write a file as torch.save does, with one of the `LazyTensor` in ``value`` in memory at a time."""
    lazy = dict.fromkeys(leaf for leaf in tree_leaves(dict(value)) if isinstance(leaf, LazyTensor))
    places = {leaf: _untouched(leaf) for leaf in lazy}
    at = {place.data_ptr(): leaf for leaf, place in places.items() if place.numel()}
    largest, freed = max((leaf.num_bytes for leaf in lazy), default=0), 0

    def content(storage: UntypedStorage) -> UntypedStorage:
        nonlocal freed
        if (leaf := at.get(storage.data_ptr())) is None:
            return storage
        if freed >= largest:
            return_freed_memory()
            freed = 0
        freed += leaf.num_bytes
        return of_its_own(leaf.make().contiguous()).untyped_storage()

    save_from(tree_map_only(LazyTensor, places.__getitem__, dict(value)), file, content)


def of_its_own(tensor: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else: a view would be written to a file with all that it is a view of."""
    is_all = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_all else tensor.clone(memory_format=torch.contiguous_format)


def _untouched(lazy: LazyTensor) -> Tensor:
    """A tensor of the same shape, whose memory the system has only promised."""
    shape = torch.Size(lazy.info.shape)
    storage = UntypedStorage(lazy.num_bytes)
    return torch.empty(0, dtype=lazy.info.dtype).set_(storage, 0, shape, contiguous_stride(shape))


def return_freed_memory() -> None:
    """Have malloc give to the system what was freed, which glibc keeps in pieces that the next tensor may not fit."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
