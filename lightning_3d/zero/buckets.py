"""Buckets: gradients of several parameters in one buffer, reduced by one collective.

A buffer has a row per rank that gets a part of the sum: one row where all of them get the whole, which is then
all-reduced, or their owner, to which it is reduced; or a row of each rank's shards, which is reduce-scattered. At the
end of every row stands one number per parameter: how many ranks have a gradient of it, so that one that no rank has
stays None, as in one process.

    two ranks, reduce-scattered     | rows of a, rank 0 | rows of b, rank 0 | 1 1 |
                                    | rows of a, rank 1 | rows of b, rank 1 | 1 1 |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_3d.torch_internals.tensors import HALVES
from lightning_3d.zero.dp_comm import DPComm, Wait
from lightning_3d.zero.power_sgd import PowerSGD
from lightning_3d.zero.shard import RankShard, plain


class _Place:
    """Where a parameter's gradient lies in the rows of a bucket.

    Args:
        num_rows: Of the bucket.
    """

    def __init__(self, shard: RankShard, num_rows: int) -> None:
        shape, self.shard = plain(shard.parameter).shape, shard
        self.own_shape = shard.own(shard.parameter).shape
        self._per_rank = shard.rows_per_rank if num_rows > 1 else shard.num_rows
        self._num_whole = shard.num_rows // self._per_rank if self._per_rank else 0
        self._whole = (self._num_whole, self._per_rank, *shape[1:])
        self._num_left = shard.num_rows - self._num_whole * self._per_rank
        self._is_even = self._num_whole == num_rows and not self._num_left

    def put(self, slots: Tensor, gradient: Tensor, scale: float, *, adds: bool) -> None:
        """Write `scale` times a gradient, or add it.

        Args:
            slots: Of shape (rows of the bucket, elements of this parameter in each).
        """
        if self._is_even:
            _put(slots.view(self._whole), gradient.view(self._whole), scale, adds=adds)
            return
        own = gradient if gradient.dim() else gradient.view(1)
        if self._num_whole:
            whole = own if not self._num_left else own[: -self._num_left]
            _put(slots[: self._num_whole].view(self._whole), whole.view(self._whole), scale, adds=adds)
        if self._num_left:
            last = own[-self._num_left :]
            _put(slots[self._num_whole, : last.numel()].view(last.shape), last, scale, adds=adds)

    def own(self, part: Tensor) -> Tensor:
        """This rank's rows, of its part of the row that it got; nothing of that part is kept where there are none."""
        if self.shard.owned_by_other:
            return part.new_empty(self.own_shape)
        return part[: self.own_shape.numel()].view(self.own_shape)


class Bucket:
    """Gradients that are reduced together; filled in a backward, then launched, then collected.

    Args:
        shards: Of its parameters, all of one dtype and device, and of one owner, or all dealt, or shared by none.
        dtype: Of what is communicated.
        compression: Of gradients in one row.
    """

    def __init__(
        self, shards: Sequence[RankShard], replicas: DPComm, dtype: torch.dtype, compression: PowerSGD | None = None
    ) -> None:
        self.parameters: tuple[nn.Parameter, ...] = tuple(shard.parameter for shard in shards)
        self._replicas, self._dtype, self._device = replicas, dtype, plain(shards[0].parameter).device
        self._compression, self._scale = compression, 1.0 / replicas.size if compression is None else 1.0
        self._num_rows = replicas.num_shards if shards[0].is_sharded else 1
        self._owner = shards[0].owner
        self._places = [_Place(shard, self._num_rows) for shard in shards]
        self._widths = [*(shard.elements_per_rank for shard in shards), len(shards)]
        self._buffer: Tensor | None = None
        self._slots: tuple[Tensor, ...] = ()  # parts of the buffer: of each parameter, and the numbers at the end
        self._result: Wait | None = None
        self._num_ranks: Wait | None = None  # the numbers at the end, where the result is the owner's alone
        self._filled: set[int] = set()
        self._num_trained = len(shards)  # counted anew when the first gradient of a backward comes

    @property
    def is_full(self) -> bool:
        """Whether the gradients of all parameters that are trained now are in."""
        return len(self._filled) >= self._num_trained if self._filled else not self.is_trained

    @property
    def is_trained(self) -> bool:
        """Whether any of its parameters is trained now."""
        return any(parameter.requires_grad for parameter in self.parameters)

    @property
    def has_begun(self) -> bool:
        """Whether it holds gradients that are not collected."""
        return bool(self._filled) or self.is_launched

    @property
    def is_launched(self) -> bool:
        """Whether its collective is under way."""
        return self._result is not None

    def fill(self, index: int, gradient: Tensor) -> None:
        """Take in a gradient, or add to it if it was taken in before.

        Args:
            index: Of the parameter among this bucket's.
        """
        if self._buffer is None:
            self._make_buffer()
        self._places[index].put(self._slots[index], gradient, self._scale, adds=index in self._filled)
        self._filled.add(index)

    def _make_buffer(self) -> Tensor:
        self._num_trained = sum(parameter.requires_grad for parameter in self.parameters)
        self._buffer = torch.empty(self._num_rows, sum(self._widths), dtype=self._dtype, device=self._device)
        self._slots = self._buffer.split(self._widths, dim=1)
        self._slots[-1].fill_(1.0)
        return self._buffer

    def launch(self) -> None:
        """Begin the collective; gradients that are not in count as zero."""
        buffer = self._make_buffer() if self._buffer is None else self._buffer
        for index in range(len(self.parameters)):
            if index not in self._filled:
                self._slots[index].zero_()
                self._slots[-1][:, index] = 0.0
        if self._compression is not None:
            self._result = self._compress(self._compression, buffer)
        elif self._owner is not None:
            self._num_ranks = self._replicas.all_reduce(self._slots[-1].clone())
            self._result = self._replicas.reduce(buffer, self._owner)
        elif self._num_rows > 1:
            self._result = self._replicas.reduce_scatter(buffer)
        else:
            self._result = self._replicas.all_reduce(buffer)
        self._buffer, self._slots = None, ()

    def _compress(self, compression: PowerSGD, buffer: Tensor) -> Wait:
        *slots, num_ranks = self._slots
        shapes = [place.own_shape or (1,) for place in self._places]
        compression.mean(buffer[0, : -len(slots)], [slot.view(s) for slot, s in zip(slots, shapes, strict=True)])
        wait = self._replicas.all_reduce(num_ranks)

        def result() -> Tensor:
            wait()
            return buffer[0]

        return result

    def collect(self) -> list[tuple[RankShard, Tensor]]:
        """Wait for the collective.

        Returns:
            This rank's part of the mean of every gradient that some rank has: of the shape of the shard's rows.
        """
        assert self._result is not None
        *parts, num_ranks = self._result().split(self._widths)
        num_ranks = num_ranks if self._num_ranks is None else self._num_ranks()
        missing = set(range(len(self.parameters))) - self._filled
        if any(self.parameters[index].requires_grad for index in missing):
            missing = {index for index, num in enumerate(num_ranks.tolist()) if num == 0.0}
        self._result, self._filled = None, set()
        pairs = enumerate(zip(self._places, parts, strict=True))
        return [(place.shard, place.own(part)) for index, (place, part) in pairs if index not in missing]


def _put(slots: Tensor, values: Tensor, scale: float, *, adds: bool) -> None:
    if adds:
        slots.add_(values, alpha=scale)
    elif slots.dtype == values.dtype:
        torch.mul(values, scale, out=slots)
    else:  # multiplied in the dtype of the slots
        slots.copy_(values).mul_(scale)


_LARGEST, _SMALLEST, _LEAST_NUMBER = 25 * 2**20, 2**20, 4


def bucket_bytes_of(total: int) -> float:
    """Bytes of parameters per bucket where nobody sets them: 25 MiB as in DDP, but several buckets of at least 1 MiB in
    a small model, since only those before the last are reduced while the backward runs.

    Args:
        total: Bytes of all parameters.
    """
    return min(_LARGEST, max(_SMALLEST, total / _LEAST_NUMBER))


def make_buckets(
    shards: Sequence[RankShard],
    replicas: DPComm,
    *,
    num_bytes: float | None = None,
    dtype: torch.dtype | None,
    compression: Callable[[int], PowerSGD | None] = lambda _: None,
) -> list[Bucket]:
    """Deal parameters to buckets in the order given.

    Args:
        num_bytes: Bytes of parameters at which a bucket is full; None for `bucket_bytes_of`.
        dtype: Of what is communicated; if None that of the gradients, but fp32 for 16-bit ones.
        compression: Index of a bucket -> how its gradients are compressed.
    """
    if num_bytes is None:
        num_bytes = bucket_bytes_of(sum(plain(shard.parameter).nbytes for shard in shards))
    full: list[tuple[torch.dtype, list[RankShard]]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device, bool, int | None], list[RankShard]] = {}
    sizes: Counter[tuple[torch.dtype, torch.device, bool, int | None]] = Counter()
    for shard in shards:
        held = plain(shard.parameter)
        key = held.dtype, held.device, shard.is_sharded, shard.owner
        open_buckets.setdefault(key, []).append(shard)
        sizes[key] += held.nbytes
        if sizes[key] >= num_bytes:
            full.append((key[0], open_buckets.pop(key)))
            del sizes[key]
    full += [(key[0], members) for key, members in open_buckets.items()]
    return [Bucket(m, replicas, dtype or reduce_dtype(own), compression(i)) for i, (own, m) in enumerate(full)]


def reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients are reduced where nobody sets it: their own, but fp32 for 16-bit ones."""
    return torch.float32 if dtype in HALVES else dtype
