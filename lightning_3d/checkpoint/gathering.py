"""Full values on rank 0 of what all ranks hold shares of, one at a time, while it writes a file.

Rank 0 learns which rank holds which boxes of a tensor and decides who sends each; whatever shards the tensor, or holds
it on another stage, its boxes then go right to rank 0:

    stage 0, rank 0        rows 0..3 of a          receive, put together on the CPU
    stage 0, rank 1        rows 4..7 of a          send
    stage 1, rank 2, 3     all of b                rank 2: send

When rank 0 comes to a tensor, it calls the other ranks, which serve until there are no more:

    rank 0    write | "a" | gather | write | "b" | gather | write ... end of file | None
    others            "a" | gather |         "b" | gather |                         None
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

    def values(self) -> dict[TreePath, Any]:
        """All values on rank 0, with a `LazyTensor` for each tensor, which makes it inside of `served`."""
        lazy: dict[object, LazyTensor] = {}
        return {
            path: lazy.setdefault(value.memory, LazyTensor(info=value.info, make=partial(self._made, path)))
            if isinstance(value, _Pieces)
            else tree_map_only(Tensor, lambda tensor: of_its_own(tensor.cpu()), value)
            for path, value in self._found.items()
            if dist.get_rank() == 0
        }

    def served(self, act: Callable[[], _Result]) -> _Result | None:
        """Let rank 0 do something that makes tensors; a collective of all ranks, None but on rank 0."""
        if dist.get_rank() == 0:
            try:
                return act()
            finally:
                _announced(None)
        while (path := _announced(None)) is not None:
            self._full(path)
        return None

    def _made(self, path: TreePath) -> Tensor:
        held = self._own.get(path)
        if isinstance(held, Share) and held.parts is None and not isinstance(held.tensor, DTensor):
            return of_its_own(held.tensor.detach().cpu())
        full = self._full(_announced(path))
        assert full is not None
        return full

    def _full(self, path: TreePath) -> Tensor | None:
        """The tensor put together on rank 0; None on others, which send theirs."""
        pieces, rank, device = self._found[path], dist.get_rank(), _sending_device()
        full = torch.empty(pieces.info.shape, dtype=pieces.info.dtype) if rank == 0 else None
        for sender, box in pieces.senders.values():
            if full is None:
                if sender == rank:
                    dist.send(_bytes(self._own[path].at(box).to(device)), 0)
            elif sender == 0:
                full[box.full] = self._own[path].at(box)
            else:
                place = full[box.full]
                is_direct = device == "cpu" and place.is_contiguous()
                room = place if is_direct else torch.empty(box.sizes, dtype=full.dtype, device=device)
                dist.recv(_bytes(room), sender)
                if not is_direct:
                    place.copy_(room)
        return full


def _sending_device() -> str:
    """The type of device that tensors are sent from: through host memory where the ranks can, as there rank 0 keeps
    them, and gloo sends from nowhere else.
    """
    config: str = dist.get_backend_config()
    return "cpu" if "cpu:" in config else config.partition(":")[0]


def _bytes(tensor: Tensor) -> Tensor:
    """Its content, since backends do not send every dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _announced(path: TreePath | None) -> Any:
    """The tensor that rank 0 says is the next, on all ranks."""
    said = [path]
    dist.broadcast_object_list(said, src=0)
    return said[0]
