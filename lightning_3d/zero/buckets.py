"""Buckets: gradients of several parameters in one buffer, reduced by one collective.

A buffer has a row per rank that gets a part of the sum: one row where all of them get the whole, which is then
all-reduced, or a row of each rank's shards, which is reduce-scattered. At the end of every row stands one number per
parameter: how many ranks have a gradient of it, so that one that no rank has stays None, as in one process.

    two ranks, reduce-scattered     | rows of a, rank 0 | rows of b, rank 0 | 1 1 |
                                    | rows of a, rank 1 | rows of b, rank 1 | 1 1 |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_3d.zero.replicas import Replicas, Wait
from lightning_3d.zero.shard import RankShard, plain


class Bucket:
    """Gradients that are reduced together; filled in a backward, then launched, then collected.

    Args:
        shards: Of its parameters, all of one dtype and device, all shared by all replicas or all by none.
        dtype: Of what is communicated.
    """

    def __init__(self, shards: Sequence[RankShard], replicas: Replicas, dtype: torch.dtype) -> None:
        self.shards, self._replicas, self._dtype = tuple(shards), replicas, dtype
        self._num_rows = replicas.size if shards[0].size > 1 else 1
        self._offsets: dict[nn.Parameter, int] = {}
        self._length = 0
        for shard in shards:
            self._offsets[shard.parameter] = self._length
            self._length += shard.elements_per_rank
        self._flags = {shard.parameter: self._length + index for index, shard in enumerate(shards)}
        self._length += len(shards)
        self._buffer: Tensor | None = None
        self._result: Wait | None = None
        self._filled: set[nn.Parameter] = set()
        self._num_trained = len(shards)  # counted anew when the first gradient of a backward comes

    @property
    def is_full(self) -> bool:
        """Whether the gradients of all parameters that are trained now are in."""
        return not self.is_trained or len(self._filled) >= self._num_trained

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is trained now."""
        return any(p.requires_grad for p in self._offsets)

    @property
    def is_launched(self) -> bool:
        """Whether its collective is under way."""
        return self._result is not None

    def fill(self, shard: RankShard, gradient: Tensor) -> None:
        """Take in a gradient, or add to it if it was taken in before."""
        buffer = self._make_buffer()
        adds = shard.parameter in self._filled
        scale, offset = 1.0 / self._replicas.size, self._offsets[shard.parameter]
        width = shard.elements_per_rank
        own = gradient.reshape(shard.num_rows, -1)
        per_rank = shard.rows_per_rank if self._num_rows > 1 else shard.num_rows
        num_whole = shard.num_rows // per_rank if per_rank else 0
        slots = buffer[:num_whole, offset : offset + width].view(num_whole, per_rank, -1) if width else None
        if slots is not None:
            _put(slots, own[: num_whole * per_rank].view(slots.shape), scale, adds=adds)
        if rest := shard.num_rows - num_whole * per_rank:
            last = own[-rest:]
            _put(buffer[num_whole, offset : offset + last.numel()].view(last.shape), last, scale, adds=adds)
        buffer[:, self._flags[shard.parameter]] = 1.0
        self._filled.add(shard.parameter)

    def _make_buffer(self) -> Tensor:
        if self._buffer is None:
            self._num_trained = sum(parameter.requires_grad for parameter in self._offsets)
            device = plain(self.shards[0].parameter).device
            self._buffer = torch.empty(self._num_rows, self._length, dtype=self._dtype, device=device)
        return self._buffer

    def launch(self) -> None:
        """Begin the collective; gradients that are not in count as zero."""
        buffer = self._make_buffer()
        for shard in self.shards:
            if shard.parameter not in self._filled:
                offset = self._offsets[shard.parameter]
                buffer[:, offset : offset + shard.elements_per_rank] = 0.0
                buffer[:, self._flags[shard.parameter]] = 0.0
        reduce = self._replicas.reduce_scatter if self._num_rows > 1 else self._replicas.all_reduce
        self._result, self._buffer = reduce(buffer), None

    def collect(self) -> list[tuple[RankShard, Tensor]]:
        """Wait for the collective.

        Returns:
            This rank's part of the mean of every gradient that some rank has: of the shape of the shard's rows.
        """
        assert self._result is not None
        row = self._result()
        missing = {shard.parameter for shard in self.shards} - self._filled
        if any(parameter.requires_grad for parameter in missing):
            num_ranks = row[-len(self.shards) :].tolist()
            pairs = zip(self.shards, num_ranks, strict=True)
            missing = {shard.parameter for shard, num in pairs if num == 0.0}
        collected = []
        for shard in self.shards:
            if shard.parameter not in missing:
                like = shard.own(shard.parameter)
                offset = self._offsets[shard.parameter]
                collected.append((shard, row[offset : offset + like.numel()].view(like.shape)))
        self._result = None
        self._filled = set()
        return collected


def _put(slots: Tensor, values: Tensor, scale: float, *, adds: bool) -> None:
    if adds:
        slots.add_(values, alpha=scale)
    else:
        torch.mul(values, scale, out=slots)


def make_buckets(
    shards: Iterable[RankShard], replicas: Replicas, *, num_bytes: float, dtype: torch.dtype | None
) -> list[Bucket]:
    """Deal parameters to buckets in the order given.

    Args:
        num_bytes: Bytes of parameters at which a bucket is full.
        dtype: Of what is communicated; that of the gradients if None.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, bool], list[RankShard]] = {}

    def close(key: tuple[torch.dtype, torch.device, bool]) -> None:
        buckets.append(Bucket(open_buckets.pop(key), replicas, dtype or key[0]))

    for shard in shards:
        held = plain(shard.parameter)
        key = held.dtype, held.device, shard.size > 1
        members = open_buckets.setdefault(key, [])
        members.append(shard)
        if sum(plain(member.parameter).nbytes for member in members) >= num_bytes:
            close(key)
    for key in list(open_buckets):
        close(key)
    return buckets
