"""Gathering the shards that every rank stepped into whole parameters, while the program goes on.

Large parameters whose rows divide evenly, or that one rank owns, are gathered in place; the others travel together in
one buffer. Until its collective has been waited for, a parameter is of the class `PendingParameter`, which waits as
soon as anything reads its values: a block's forward, a callback, a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves
from lightning_3d.zero.dp_comm import DPComm, Wait
from lightning_3d.zero.shard import RankShard

_IN_PLACE_BYTES = 2**20  # a collective of its own costs more than the copies of a smaller one

_ATTRIBUTES = ("requires_grad", "grad", "shape", "dtype", "device", "is_leaf", "grad_fn", "ndim")
_ABOUT = {  # what a parameter says of itself without its values
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(getattr(Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__hash__),
}


class PendingParameter(nn.Parameter):
    """A parameter whose values are on their way; what reads them waits for them and makes it an ``nn.Parameter``."""

    def wait(self) -> None:
        """Wait for the values."""
        vars(self)["_arrival"].finish()

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func not in _ABOUT:
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, PendingParameter):
                    value.wait()
            return func(*args, **(kwargs or {}))
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        self.wait()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        self.wait()
        return self.__reduce_ex__(protocol)


def wait_for(parameters: Iterable[nn.Parameter]) -> None:
    """Wait for the values of these that are on their way."""
    for parameter in parameters:
        if isinstance(parameter, PendingParameter):
            parameter.wait()


class _Arrival:
    """A collective under way, and the parameters that wait for it."""

    def __init__(self, tensors: Sequence[Tensor], wait: Wait, place: Callable[[], None] | None) -> None:
        self._tensors, self._wait, self._place = tensors, wait, place
        self._has_finished = False

    def finish(self) -> None:
        if self._has_finished:
            return
        self._has_finished = True
        for tensor in self._tensors:
            if type(tensor) is PendingParameter:
                del vars(tensor)["_arrival"]
                tensor.__class__ = nn.Parameter  # type: ignore[assignment]  # as torch's lazy parameters become real
        self._wait()
        if self._place is not None:
            self._place()

    def defer_wait(self) -> None:
        if all(type(tensor) is nn.Parameter for tensor in self._tensors):
            for tensor in self._tensors:
                vars(tensor)["_arrival"] = self
                tensor.__class__ = PendingParameter
        else:  # a DTensor, whose class says how operators treat it
            self.finish()


class Gathering:
    """Gathers tensors of which each rank has its own rows."""

    def __init__(self, replicas: DPComm) -> None:
        self._replicas = replicas
        self._arrivals: list[_Arrival] = []

    def begin(self, shards: Sequence[RankShard], tensors: Sequence[Tensor]) -> None:
        """Begin to gather; every rank calls it.

        Args:
            shards: Of parameters.
            tensors: For each shard a tensor like its parameter, of which this rank's rows are valid.
        """
        together: dict[tuple[torch.dtype, torch.device], list[tuple[RankShard, Tensor]]] = {}
        for shard, tensor in zip(shards, tensors, strict=True):
            held = part_of(tensor).detach()
            is_even = shard.owner is not None or shard.num_rows % shard.size == 0
            if not is_even or held.nbytes < _IN_PLACE_BYTES or not held.is_contiguous():
                together.setdefault((held.dtype, held.device), []).append((shard, tensor))
            elif shard.owner is not None:
                self._arrivals.append(_Arrival([tensor], self._replicas.broadcast(held, shard.owner), None))
            else:
                self._arrivals.append(_Arrival([tensor], self._replicas.all_gather(held, shard.own(tensor)), None))
        self._arrivals += map(self._begin_together, together.values())

    def _begin_together(self, together: Sequence[tuple[RankShard, Tensor]]) -> _Arrival:
        """A row from each rank: its rows of those that are dealt, then all of those that it owns.

        Ranks own about as many elements, so that little of the buffer is empty.
        """
        size, rank = self._replicas.num_shards, self._replicas.shard_rank
        offsets, ends = [], [0] * size
        for shard, _ in together:
            sending = range(size) if shard.owner is None else [shard.owner]
            offsets.append(start := max(ends[sender] for sender in sending))
            for sender in sending:
                ends[sender] = start + shard.elements_per_rank
        row = part_of(together[0][1]).detach().new_empty(max(ends))
        for (shard, tensor), start in zip(together, offsets, strict=True):
            own = shard.own(tensor)
            row[start : start + own.numel()] = own.reshape(-1)
        result = row.new_empty(size, row.numel())

        def place() -> None:
            for (shard, tensor), start in zip(together, offsets, strict=True):
                held = part_of(tensor).detach()
                parts = result[:, start : start + shard.elements_per_rank]
                if shard.owner is None:
                    rows = parts.reshape(size * shard.rows_per_rank, -1)[: shard.num_rows]
                    held.copy_(rows.view(held.shape))
                elif shard.owner != rank:
                    held.copy_(parts[shard.owner].view(held.shape))

        return _Arrival([tensor for _, tensor in together], self._replicas.all_gather(result, row), place)

    def defer_wait(self) -> None:
        """Let the program go on: values arrive when they are read."""
        for arrival in self._arrivals:
            arrival.defer_wait()

    def finish(self) -> None:
        """Wait for all that is on its way."""
        for arrival in self._arrivals:
            arrival.finish()
        self._arrivals = []
