"""Where the operands of a call go that is not local on slices of sequences as they lie.

    another dim     an all-to-all: heads or channels are cut, and each rank has the whole sequence of its own. For
                    attention this is DeepSpeed-Ulysses (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509)
    each            an all-gather of some operands, as of keys and values, while others stay slices
    stay            keys and values pass round while the call is made (`ring`)
    whole           every rank makes the whole call

Of the ways on which a call is local the one that sends the fewest bytes is taken; where ranks then compute for unequal
times, what they might send meanwhile counts, too. A way is tried on stand-ins, which have shapes and no memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.collectives import bytes_sent
from lightning_3d.sharding.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Partial,
    Replicate,
    Shard,
    Sharded,
    chunked,
    with_length,
)
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.function import tensors_in
from lightning_3d.sharding.sharded_tensor import ShardedTensor

Target = Sharded | Replicate | None
"""Where an operand goes; None: it stays."""

Local = Callable[[TorchCall], LocalCall | None]
"""How every rank makes a call on what it has; None if it can't."""

_MAX_WAYS = 4096
"""Ways of one call that are tried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sequences:
    """The sequences of a step."""

    lengths: frozenset[int]
    batch: int
    """Samples, whose dim is not cut: of one long sequence there is nothing to cut."""
    batch_dim: int = 0


def cheapest(
    call: TorchCall, axis: Axis, local: Local, sequences: Sequences, fixed: Tensor | None = None
) -> Sequence[Target] | None:
    """By tensor of a call where it goes, so that the call is local; None if it is local nowhere.

    Args:
        fixed: Stays where it is, as it is changed in place.
    """
    options = [_options(tensor, axis, sequences, is_fixed=tensor is fixed) for tensor in call.tensors]
    ways = sorted(
        itertools.islice(itertools.product(*options), _MAX_WAYS), key=lambda way: sum(cost for cost, _ in way)
    )
    best: Sequence[Target] | None = None
    best_cost = float("inf")
    for way in ways:
        cost = sum(cost for cost, _ in way)
        if cost >= best_cost:
            break
        targets = [target for _, target in way]
        trial = _trial(call, targets, axis)
        found = local(trial) if any(isinstance(tensor, ShardedTensor) for tensor in trial.tensors) else None
        if found is None or isinstance(found.result, Replicate):
            continue
        cost += found.sends + found.idle
        results = found.result if isinstance(found.result, tuple) else (found.result,)
        if any(isinstance(at, Partial) for at in results):  # summed, and then whole on each rank
            cost += 3 * _result_bytes(call) * (axis.size - 1) / axis.size
        if cost < best_cost:
            best, best_cost = targets, cost
    return best


def moves_of(call: TorchCall, way: Sequence[Target] | None, axis: Axis, local: Local) -> tuple[str, int] | None:
    """How operands of a call move, for people, and the bytes that a rank sends for it; None if none does."""
    sharded = [tensor for tensor in call.tensors if isinstance(tensor, ShardedTensor)]
    targets = [REPLICATE] * len(sharded) if way is None else way
    tensors = sharded if way is None else call.tensors
    moves = [(t, to) for t, to in zip(tensors, targets, strict=True) if to is not None and isinstance(t, ShardedTensor)]
    num_bytes = sum(bytes_sent(t.shape, t.element_size(), t.placement, to, axis.size) for t, to in moves)
    if not moves:
        made = local(call)
        return ("operands pass round the ranks", made.sends) if made is not None and made.sends else None
    if way is None:
        return "all of it on every rank, as it is local on no slices", num_bytes
    kinds = {"all-gather" if isinstance(to, Replicate) else f"all-to-all to dim {to.dim}" for _, to in moves}
    return f"{' and '.join(sorted(kinds))} of {len(moves)} of {len(call.tensors)} operands", num_bytes


def _options(tensor: Tensor, axis: Axis, sequences: Sequences, *, is_fixed: bool) -> list[tuple[float, Target]]:
    """Ways of a tensor: its cost in bytes, and where it goes; None: it stays."""
    options: list[tuple[float, Target]] = [(0.0, None)]
    if not isinstance(tensor, ShardedTensor) or is_fixed:
        return options
    at = tensor.placement

    def cost(target: Sharded | Replicate) -> float:
        return bytes_sent(tensor.shape, tensor.element_size(), at, target, axis.size)

    for dim, length in enumerate(tensor.shape):
        is_batch = dim == sequences.batch_dim and length == sequences.batch
        is_sequence = length in sequences.lengths
        if dim == at.dim or not (is_sequence or (length and length % axis.size == 0 and not is_batch)):
            continue
        target = chunked(dim, length, axis.size)
        options.append((cost(target) * (1 if is_sequence else 1.01), target))
    options.append((cost(REPLICATE), REPLICATE_PARTIAL_GRAD))
    return options


def _trial(call: TorchCall, targets: Sequence[Target], axis: Axis) -> TorchCall:
    """The call on tensors of no memory that lie as these would after their moves."""
    left = iter(targets)

    def stand_in(tensor: Tensor) -> Tensor:
        target = next(left)
        if not isinstance(tensor, ShardedTensor) or target is None:
            return tensor
        blank = torch.empty((), dtype=tensor.dtype, device=tensor.device)
        if isinstance(target, Replicate):
            return blank.expand(tensor.shape)
        assert isinstance(target, Shard)
        length = target.sizes(tensor.shape[target.dim], axis.size)[axis.rank]
        return ShardedTensor(blank.expand(with_length(tensor.shape, target.dim, length)), axis, target)

    return call.mapped(stand_in)


def _result_bytes(call: TorchCall) -> int:
    """Bytes of what a call gives, found out on the meta device; those of its largest operand where that fails."""
    try:
        made = call.mapped(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        return sum(tensor.nbytes for tensor in tensors_in(made.function(*made.args, **made.kwargs)))
    except Exception:  # code of any function
        return max(tensor.numel() * tensor.element_size() for tensor in call.tensors)
