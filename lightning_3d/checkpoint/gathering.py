"""Full values on rank 0 of what all ranks hold shares of, one at a time, while it writes a file.

Rank 0 learns which rank holds which boxes of a tensor and decides who sends each; whatever shards the tensor, or holds
it on another stage, its boxes then go right to rank 0:

    stage 0, rank 0        rows 0..3 of a          receive, put together on the CPU
    stage 0, rank 1        rows 4..7 of a          send
    stage 1, rank 2, 3     all of b                rank 2: send

When rank 0 comes to a tensor, it calls the other ranks, which serve until there are no more:

    rank 0    write | "a" | gather | write | "b" | gather | write ... end of file | None
    others            "a" | gather |         "b" | gather |                         None

Before each box a rank sends whether it comes, so that one that can't send leaves none waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import Box, Share, TensorInfo
from lightning_3d.checkpoint.content import TreePath
from lightning_3d.checkpoint.lazy import LazyTensor, of_its_own
from lightning_3d.distributed.agreement import raise_on_all_ranks
from lightning_3d.errors import CheckpointError
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.pytree import tree_map_only

_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class _Pieces:
    """The boxes of a tensor and where they come from."""

    info: TensorInfo
    senders: dict[tuple[torch.Size, torch.Size], tuple[int, Box]]
    """Offsets and sizes of each -> the rank that sends it."""
    memory: object
    """The rank that was the first to have some of it and where it lies there: tied tensors have the same."""

    @staticmethod
    def of(path: TreePath, share: Share) -> _Pieces:
        """The pieces of this rank."""
        info, own, rank = TensorInfo.of(share.tensor), part_of(share.tensor.detach()), dist.get_rank()
        assert info is not None
        return _Pieces(
            info=info,
            senders={(box.offsets, box.sizes): (rank, box) for box in share.boxes if box.sizes.numel()},
            memory=(rank, own.data_ptr(), own.stride(), info) if own.numel() else path,
        )

    def add(self, other: _Pieces) -> None:
        """Take boxes from a later rank, too, if those before it lack them."""
        if all(sizes != self.info.shape for _, sizes in self.senders):
            for key, sender in other.senders.items():
                self.senders.setdefault(key, sender)


class Gathering:
    """Values of all ranks by path, for rank 0; making it is a collective of all ranks.

    Args:
        own: What this rank has: shares of tensors, and other values.
    """

    def __init__(self, own: Mapping[TreePath, Any]) -> None:
        self._own = own
        held = {path: _Pieces.of(path, value) if isinstance(value, Share) else value for path, value in own.items()}
        everyone: list[dict[TreePath, Any]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(held, everyone)
        found: dict[TreePath, Any] = {}
        for of_rank in everyone or ():
            for path, value in of_rank.items():
                known = found.setdefault(path, value)
                if known is not value and isinstance(known, _Pieces):
                    known.add(value)
        said = [found]
        dist.broadcast_object_list(said, src=0)
        self._found = said[0]

    def values(self) -> dict[TreePath, object]:
        """All values on rank 0, with a `LazyTensor` for each tensor, which makes it inside of `with_peers_serving`."""
        lazy: dict[object, LazyTensor] = {}
        return {
            path: lazy.setdefault(value.memory, LazyTensor(info=value.info, make=partial(self._made, path)))
            if isinstance(value, _Pieces)
            else tree_map_only(Tensor, lambda tensor: of_its_own(tensor.cpu()), value)
            for path, value in self._found.items()
            if dist.get_rank() == 0
        }

    def with_peers_serving(self, act: Callable[[], _Result]) -> _Result | None:
        """Run ``act`` on rank 0, while the others send it their boxes; a collective of all ranks, None but on rank 0.

        Raises:
            Exception: What ``act`` raised, or why a rank could not send; on all ranks.
        """
        result: _Result | None = None
        with raise_on_all_ranks():
            if dist.get_rank() == 0:
                try:
                    result = act()
                finally:
                    _announced(None)
            else:
                while (path := _announced(None)) is not None:
                    self._send(path)
        return result

    def _made(self, path: TreePath) -> Tensor:
        held = self._own.get(path)
        if isinstance(held, Share) and held.parts is None and not isinstance(held.tensor, DTensor):
            return of_its_own(held.tensor.detach().cpu())
        pieces, device = self._found[path], _sending_device()
        full = torch.empty(pieces.info.shape, dtype=pieces.info.dtype)  # all memory comes before others wait to send
        places = [(sender, box, full[box.full]) for sender, box in pieces.senders.values()]
        rooms = [(sender, place, _room(place, device)) for sender, _, place in places if sender != 0]
        _announced(path)
        if reasons := [reason for sender, _, room in rooms if (reason := _received(room, sender))]:
            raise CheckpointError(f"{'.'.join(map(str, path))} could not be gathered: {reasons[0]}")
        for _, place, room in rooms:
            if room is not place:
                place.copy_(room)
        for sender, box, place in places:
            if sender == 0:
                place.copy_(self._own[path].at(box))
        return full

    def _send(self, path: TreePath) -> None:
        """Send this rank's boxes of a tensor to rank 0, or why it can't."""
        device = _sending_device()
        for sender, box in self._found[path].senders.values():
            if sender != dist.get_rank():
                continue
            try:
                content, length_of_reason = _bytes(self._own[path].at(box).to(device)), 0
            except Exception as error:  # rank 0 waits, and raises it on all ranks
                reason = bytearray(f"rank {sender} ran into {type(error).__name__}: {error}".encode())
                content, length_of_reason = torch.frombuffer(reason, dtype=torch.uint8).to(device), len(reason)
            dist.send(torch.tensor([length_of_reason], device=device), 0)
            dist.send(content, 0)


def _room(place: Tensor, device: str) -> Tensor:
    """Memory for what goes to a place in a tensor: the place itself, where it can be received right there."""
    is_direct = device == "cpu" and place.is_contiguous()
    return place if is_direct else torch.empty(place.shape, dtype=place.dtype, device=device)


def _received(room: Tensor, sender: int) -> str:
    """Receive a box, or why its rank could not send it; empty if it did."""
    length = torch.zeros(1, dtype=torch.int64, device=room.device)
    dist.recv(length, sender)
    if not length:
        dist.recv(_bytes(room), sender)
        return ""
    text = torch.empty(int(length), dtype=torch.uint8, device=room.device)
    dist.recv(text, sender)
    return bytes(text.tolist()).decode()


def _sending_device() -> str:
    """The type of device that tensors are sent from: through host memory where the ranks can, as there rank 0 keeps
    them, and gloo sends from nowhere else.
    """
    config: str = dist.get_backend_config()
    return "cpu" if "cpu:" in config else config.partition(":")[0]


def _bytes(tensor: Tensor) -> Tensor:
    """Its content, since backends do not send every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _announced(path: TreePath | None) -> TreePath | None:
    """The tensor that rank 0 says is the next, on all ranks."""
    said = [path]
    dist.broadcast_object_list(said, src=0)
    return said[0]
