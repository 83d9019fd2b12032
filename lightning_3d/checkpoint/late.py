"""Values of a file that are gathered while it is written, so that rank 0 has one of them at a time.

Before, they are tensors without content in the checkpoint on rank 0, each at an address of its own. When the file comes
to one, rank 0 tells the other ranks, which serve until there are no more:

    rank 0    write | "3" | gather | write | "4" | gather | write ... end of file | None
    others            "3" | gather |         "4" | gather |                         None
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.checkpoint.gathering import NO_PARTS, Gathering
from lightning_3d.checkpoint.own_state import Key
from lightning_3d.checkpoint.room import Room
from lightning_3d.tensor.placement import Parts

Content = Callable[[UntypedStorage], UntypedStorage]
"""A storage in a checkpoint -> one whose first bytes are written to the file in its place."""


class LateValues:
    """Values to gather for one file; all ranks call its methods alike."""

    def __init__(self) -> None:
        self._gatherings: list[Gathering[Any]] = []
        self._places: dict[int, tuple[int, Any]] = {}  # address -> gathering and key
        self._largest = self._freed = 0  # bytes of the largest value, and of those written since memory was returned

    def gathered(
        self,
        own: Mapping[Key, Any],
        pp: DeviceMesh | None,
        dp: DeviceMesh | None = None,
        grouped: Mapping[Key, Parts] = NO_PARTS,
    ) -> dict[Key, Any]:
        """A `Gather`, whose tensors have their content in `write`, but for those that rank 0 has as they are."""
        gathering = Gathering(own, pp, dp, grouped)
        number = len(self._gatherings)
        self._gatherings.append(gathering)
        if dist.get_rank() != 0:
            return {}
        late = {key: info for key, info in gathering.found.items() if not gathering.is_at_hand(key)}
        room = Room(late.values())
        values: dict[Key, Any] = {}
        for key in gathering.found:
            values[key] = room.take(late[key]) if key in late else gathering.value(key)
            if key in late and values[key].numel() > 0:
                self._places[values[key].data_ptr()] = number, key
                self._largest = max(self._largest, values[key].nbytes)
        return values

    def write(self, act: Callable[[Content], None]) -> None:
        """Let rank 0 write a checkpoint with what came of `gathered`; a collective of all ranks."""
        if dist.get_rank() == 0:
            try:
                act(self._content)
            finally:
                _announced(None)
            return
        while (place := _announced(None)) is not None:
            self._value(place)

    def _content(self, storage: UntypedStorage) -> UntypedStorage:
        place = self._places.get(storage.data_ptr())
        if place is None:
            return storage
        if self._freed >= self._largest:
            _return_freed_memory()
            self._freed = 0
        self._freed += storage.nbytes()
        value = self._value(_announced(place))
        assert isinstance(value, Tensor)
        return value.contiguous().untyped_storage()

    def _value(self, place: Any) -> Any:
        number, key = place
        return self._gatherings[number].value(key)


def _return_freed_memory() -> None:
    """Have malloc give to the system what was freed, which glibc keeps in pieces that the next tensor may not fit."""
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def _announced(place: tuple[int, Any] | None) -> Any:
    """The value that rank 0 says is the next, on all ranks."""
    said = [place]
    dist.broadcast_object_list(said, src=0)
    return said[0]
