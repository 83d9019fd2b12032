"""Whole values on rank 0 of what all ranks hold shares of, all at once or one at a time.

Rank 0 learns which rank holds which boxes of a tensor and decides who sends each; whatever shards the tensor, or holds
it on another stage, its boxes then go right to rank 0:

    stage 0, rank 0        rows 0..3 of a          receive, put together on the CPU
    stage 0, rank 1        rows 4..7 of a          send
    stage 1, rank 2, 3     all of b                rank 2: send
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import Box, TensorInfo
from lightning_3d.checkpoint.own_state import Key
from lightning_3d.checkpoint.share import Share
from lightning_3d.torch_internals.pytree import tree_map_only


class Gather(Protocol):
    """Values on rank 0 of what each rank has, by key, and nothing elsewhere; a collective of all ranks."""

    def __call__(self, own: Mapping[Key, Any]) -> dict[Key, Any]: ...


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """The boxes of a tensor and where they come from."""

    info: TensorInfo
    senders: dict[tuple[torch.Size, torch.Size], tuple[int, Box]]
    """Offsets and sizes of each -> the rank that sends it."""

    @staticmethod
    def of(share: Share) -> _Pieces:
        """The pieces of this rank."""
        info = TensorInfo.of(share.tensor)
        assert info is not None
        boxes = [box for box in share.boxes if box.sizes.numel()]
        return _Pieces(info=info, senders={(box.offsets, box.sizes): (dist.get_rank(), box) for box in boxes})

    def add(self, other: _Pieces) -> None:
        """Take boxes from a later rank, too, if those before it lack them."""
        if all(sizes != self.info.shape for _, sizes in self.senders):
            for key, sender in other.senders.items():
                self.senders.setdefault(key, sender)


class Gathering(Generic[Key]):
    """Full tensors and other values of what each rank has; making it is a collective of all ranks.

    Args:
        own: What this rank has, by key: shares of tensors, and other values.
    """

    def __init__(self, own: Mapping[Key, Any]) -> None:
        self._own = own
        held = {key: _Pieces.of(value) if isinstance(value, Share) else value for key, value in own.items()}
        everyone: list[dict[Key, Any]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(held, everyone)
        found: dict[Key, Any] = {}
        for of_rank in everyone or ():
            for key, value in of_rank.items():
                known = found.setdefault(key, value)
                if known is not value and isinstance(known, _Pieces):
                    known.add(value)
        said = [found]
        dist.broadcast_object_list(said, src=0)
        self._found = said[0]

    @property
    def found(self) -> dict[Key, Any]:
        """The `TensorInfo` of tensors, and values that are none, by key; alike on all ranks."""
        return {key: value.info if isinstance(value, _Pieces) else value for key, value in self._found.items()}

    def is_at_hand(self, key: Key) -> bool:
        """Whether `value` takes neither memory nor other ranks on this rank, rank 0."""
        if not isinstance(self._found[key], _Pieces):
            return True
        whole = self._held_whole(key)
        return whole is not None and whole.device.type == "cpu" and _is_all_of_its_storage(whole)

    def value(self, key: Key) -> Any:
        """The value, its tensors whole and on the CPU; None but on rank 0. A collective of all ranks."""
        value = self._found[key]
        is_first = dist.get_rank() == 0
        if isinstance(value, _Pieces):
            held = self._held_whole(key) if is_first else None
            value = self._on_first(key) if held is None else held
        return tree_map_only(Tensor, lambda tensor: of_its_own(tensor.cpu()), value) if is_first else None

    def _held_whole(self, key: Key) -> Tensor | None:
        """The tensor if this rank, rank 0, has all of it in its original order."""
        share = self._own.get(key)
        if not isinstance(share, Share) or share.parts is not None or isinstance(share.tensor, DTensor):
            return None
        return share.tensor.detach()

    def _on_first(self, key: Key) -> Tensor | None:
        """The tensor put together on rank 0; None on others, which send theirs."""
        pieces, rank, device = self._found[key], dist.get_rank(), _sending_device()
        whole = torch.empty(pieces.info.shape, dtype=pieces.info.dtype) if rank == 0 else None
        for sender, box in pieces.senders.values():
            if whole is None:
                if sender == rank:
                    dist.send(_bytes(self._own[key].at(box).to(device)), 0)
            elif sender == 0:
                whole[box.full] = self._own[key].at(box)
            else:
                place = whole[box.full]
                is_direct = device == "cpu" and place.is_contiguous()
                room = place if is_direct else torch.empty(box.sizes, dtype=whole.dtype, device=device)
                dist.recv(_bytes(room), sender)
                if not is_direct:
                    place.copy_(room)
        return whole


def gather(own: Mapping[Key, Any]) -> dict[Key, Any]:
    """All values at once; a `Gather`."""
    gathering = Gathering(own)
    full = {key: gathering.value(key) for key in gathering.found}
    return full if dist.get_rank() == 0 else {}


def _sending_device() -> str:
    """The type of device that tensors are sent from: through host memory where the ranks can, as there rank 0 keeps
    them, and gloo sends from nowhere else.
    """
    config: str = dist.get_backend_config()
    return "cpu" if "cpu:" in config else config.partition(":")[0]


def _bytes(tensor: Tensor) -> Tensor:
    """Its content, since backends do not send every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def of_its_own(tensor: Tensor) -> Tensor:
    """A tensor whose storage holds nothing else: a view would be written to a file with all that it is a view of."""
    return tensor if _is_all_of_its_storage(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_all_of_its_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes
