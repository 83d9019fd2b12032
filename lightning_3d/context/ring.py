"""Ring attention (Liu et al. 2023, https://arxiv.org/abs/2310.01889): keys and values pass round the ranks.

Every rank keeps its queries. In each turn it attends to the keys and values that it has, while these go on to the next
rank and others come from the one before:

    turn              0      1      2
    on rank 0    kv   0      2      1
    on rank 1    kv   1      0      2
    on rank 2    kv   2      1      0

The outputs o_i of the turns merge by the log-sum-exp L_i of their scores, L of all: o = sum_i exp(L_i - L) o_i. The
backward of a turn, given o and L, is its share of the gradients. Those of keys and values follow these from rank to
rank, are added to in each turn, in the dtype of keys as a reduce-scatter adds, and end where they belong. A rank holds
two slices of keys and values at a time, never all.

Under a causal mask in order a rank has nothing to compute in a turn with later keys, so that the last rank computes
most. Of a head and a tail (`head_tail`) it computes as much in every turn:

    keys of                queries      keys
    the rank itself        all          all, under the mask
    a rank before it       all          the head
    a rank behind it       the tail     all

torch's own ring (``torch.distributed.tensor.experimental``) is for slices of one length, on CUDA, of DTensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_3d.activations.collective_mode import collective
from lightning_3d.config.context import RowOrder
from lightning_3d.context.axis import ContextAxis
from lightning_3d.context.head_tail import exchanged, head_tail, idle_bytes
from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.collectives import bytes_sent
from lightning_3d.sharding.placement import REPLICATE, Shard
from lightning_3d.sharding.rules.attention import Attention
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.randomness import draws
from lightning_3d.sharding.sharded_tensor import cut_dim, placement_of
from lightning_3d.torch_internals.attention_kernels import attend, attend_backward, has_kernel
from lightning_3d.torch_internals.dispatch import no_dispatch_modes


def attend_in_ring(call: TorchCall, axis: Axis, order: RowOrder) -> LocalCall | None:
    """Attention of this rank's queries to its keys and values, and to those that come by."""
    attention = Attention(*call.args, **call.kwargs)
    query, key, _ = operands = attention.query, attention.key, attention.value
    if not isinstance(axis, ContextAxis) or not are_cut(operands, -2):
        return None
    if unserved(attention) is not None:
        return None
    at, of_key = placement_of(query), placement_of(key)
    assert isinstance(at, Shard)
    assert isinstance(of_key, Shard)
    slices = of_key.sizes(key.shape[-2], axis.size)
    sends, idle = 2 * bytes_sent(key.shape, key.element_size(), of_key, REPLICATE, axis.size), 0
    pieces = head_tail(order, query, key, slices) if attention.is_causal else None
    if pieces is not None:
        sends += pieces.bytes_sent(query, key)
    elif attention.is_causal:
        idle = idle_bytes(query, axis.size)
    ring = _Ring(
        axis=axis,
        lengths=slices if pieces is None else pieces.held,
        heads=None if pieces is None else pieces.heads,
        is_causal=attention.is_causal,
        scale=attention.scale,
    )

    def run(*own: Tensor) -> Tensor:
        batch = own[0].shape[:-3]
        flat = tuple([tensor.to(_dtype(tensor)).reshape(math.prod(batch), *tensor.shape[-3:]) for tensor in own])
        if pieces is not None:
            flat = exchanged(flat, axis, pieces, is_back=False)
        output: Tensor = _RingAttention.apply(*flat, ring)  # type: ignore[no-untyped-call]  # torch 2.13
        if pieces is not None:
            (output,) = exchanged((output,), axis, pieces, is_back=True)
        return output.view(*batch, *output.shape[1:])

    return LocalCall(
        tensors=operands, input_placements=(at, of_key, of_key), run=run, result=at, sends=sends, idle=idle
    )


def are_cut(operands: Iterable[Tensor], dim: int) -> bool:
    """Whether all operands of attention are cut along one dim, which counts from the last: rows -2, heads -3."""
    return all(cut_dim(tensor) == tensor.dim() + dim for tensor in operands)


def unserved(attention: Attention) -> str | None:
    """Why a ring can't serve attention on slices; None if it can."""
    query, key, value = attention.query, attention.key, attention.value
    if attention.attn_mask is not None:
        return "it passes no mask round but a causal one, and there is an attn_mask"
    if draws(attention.dropout_p):
        return f"it drops nothing, and there is dropout_p={attention.dropout_p}"
    if attention.is_causal and (query.shape[-2] != key.shape[-2] or placement_of(query) != placement_of(key)):
        return "with is_causal it takes as many keys as queries"
    if key.shape != value.shape or placement_of(key) != placement_of(value):
        return "it takes values of the shape of keys"
    alike = (*query.shape[:-3], query.shape[-1]) == (*key.shape[:-3], key.shape[-1])
    grouped = attention.enable_gqa and query.dim() > 2 and query.shape[-3] % key.shape[-3] == 0
    if query.dim() < 3 or not alike or not (grouped or query.shape[-3] == key.shape[-3]):
        return "it takes keys of the shape of queries, but for their number and that of heads with enable_gqa=True"
    dtypes = {_dtype(tensor) for tensor in (query, key, value)}
    if len(dtypes) > 1 or not has_kernel(query.device, _dtype(query), query.shape[-1]):
        names = ", ".join(sorted(map(str, dtypes)))
        return f"torch has no kernel for it, or is told to use none, on {query.device.type} for {names}"
    return None


def _dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of an operand to the kernel: autocast's, where it casts."""
    kind = tensor.device.type
    is_cast = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if is_cast else tensor.dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ring:
    """The way round the ranks, and what all turns of one attention share."""

    axis: ContextAxis

    lengths: tuple[int, ...]
    """By rank the keys that it has."""

    heads: tuple[int, ...] | None
    """By rank those of its head, under a causal mask; None in order."""

    is_causal: bool
    scale: float | None

    def turns(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """By turn the rank that keys and values are of, and these; the next ones come in the meantime.

        Args:
            own: ``[2, batch, kv_heads, keys, head_dim]``: the keys and values of this rank.
        """
        held, source = own, self.axis.rank
        for _ in range(self.axis.size - 1):
            wait = self.pass_on(held, source)
            yield source, held
            held, source = wait(), self.before(source)
        yield source, held

    def pass_on(self, pair: Tensor, source: int) -> Callable[[], Tensor]:
        """Begin to send keys and values of a rank, or their gradients, and to receive those of the rank before it."""
        *others, _, head_dim = pair.shape
        return self.axis.pass_on(pair, pair.new_empty(*others, self.lengths[self.before(source)], head_dim))

    def before(self, rank: int) -> int:
        """The rank that sends to a rank."""
        return (rank - 1) % self.axis.size

    def read(self, source: int) -> tuple[slice, slice]:
        """Which queries of this rank attend to which keys of another."""
        every, rank = slice(None), self.axis.rank
        if not self.is_causal or source == rank:
            return every, every
        if self.heads is None:
            return every, every if source < rank else slice(0)
        return (every, slice(self.heads[source])) if source < rank else (slice(self.heads[rank], None), every)

    def options(self, source: int) -> dict[str, Any]:
        """Arguments of a kernel: only among the rank's own keys are there later ones."""
        return {"is_causal": self.is_causal and source == self.axis.rank, "scale": self.scale}


class _RingAttention(torch.autograd.Function):
    """Attention of this rank's queries; it saves what one attention does: the operands, the output and its L."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> Tensor:
        query = _rows_in_order(query)
        output, lse = collective(partial(_attended, query, key, value, ring))
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable  # as torch's own kernels
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        ring: _Ring = ctx.ring
        gradient = _rows_in_order(gradient)
        of_query, of_own, waits = torch.zeros_like(query, dtype=lse.dtype), None, None
        for source, pair in ring.turns(torch.stack((key, value))):
            of_pair = torch.zeros_like(pair)
            rows, keys = ring.read(source)
            of_output, part, given, its_lse = (tensor[:, :, rows] for tensor in (gradient, query, output, lse))
            key, value = pair[..., keys, :]
            if part.numel() and key.numel():
                of_part, *of_both = attend_backward(
                    *(of_output, part, key, value, given, its_lse.contiguous()), **ring.options(source)
                )
                of_query[:, :, rows] += of_part
                of_pair[..., keys, :] = torch.stack(of_both)
            if of_own is None:  # stays here, and the gradients of others come to it at the end
                of_own = of_pair
                continue
            if waits is not None:
                of_pair += waits()
            waits = ring.pass_on(of_pair, source)
        assert of_own is not None
        assert waits is not None
        of_key, of_value = of_own + waits()
        return of_query.to(query.dtype), of_key, of_value, None


def _attended(query: Tensor, key: Tensor, value: Tensor, ring: _Ring) -> tuple[Tensor, Tensor]:
    """The output of this rank's queries, and the log-sum-exp of their scores."""
    with no_dispatch_modes():  # a recomputation gets both as what one collective gave
        output = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        lse = output.new_full(query.shape[:3], -torch.inf)
        for source, pair in ring.turns(torch.stack((key, value))):
            rows, keys = ring.read(source)
            part, its_pair = query[:, :, rows], pair[..., keys, :]
            if part.numel() and its_pair.numel():
                made, of_made = attend(part, *its_pair, **ring.options(source))
                merged, its_lse = output[:, :, rows], lse[:, :, rows]
                merged.lerp_(made.to(output.dtype), torch.sigmoid(of_made - its_lse).unsqueeze(-1))
                torch.logaddexp(its_lse, of_made, out=its_lse)
        return output.to(query.dtype), lse


def _rows_in_order(tensor: Tensor) -> Tensor:
    """The tensor with row after row in memory, as projections give it: the kernels want no gaps in a head."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
