"""Finding the tensor-parallel plan of a block: follow it, and take back what costs more than it is worth.

The first run shards all that it can (`follow`): a column weight for each replicated activation, a row weight for each
sharded one, which for an ordinary transformer block is Megatron's plan (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053). Fused weights are then sharded part by part (`grouped`). Last, each sharding that
communicates too much is tried without it:

* an activation that is gathered, unless it is small beside the outputs that it comes from;
* a column-row pair whose all-reduce sends more than gathering the outputs of both weights would (narrow waists, LoRA).

Stacked weights of experts stay sharded all the same: replicated, each rank would hold all experts for what a few tokens
send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any

from torch import nn

from lightning_3d.errors import PlanError
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan, Role, replicated_plan
from lightning_3d.tensor.plan.follow import ChangedInPlace, Cut, Followed, follow_block
from lightning_3d.tensor.plan.ledger import Communication
from lightning_3d.tensor.plan.weights import named_parameters

Follow = Callable[[dict[str, str]], Followed]
"""Follows a block in which some weights must not be sharded: FQN -> reason."""


def plan_block(
    block: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    size: int,
    excluded: Collection[nn.Parameter] = frozenset(),
    by_hand: Mapping[str, Role] = MappingProxyType({}),
    sequence_parallel: bool = False,
    unread: frozenset[int] = frozenset(),
) -> BlockTensorPlan:
    """Decide for every parameter of a block whether and how it is sharded over `size` tensor-parallel ranks.

    Pure: no process group, no collective, no memory for tensors; the block is left as it was.

    Args:
        block: On any device, meta included. Its ``forward`` runs, its hooks do not.
        args: Example arguments of its forward, real, fake or meta: only shape, dtype and device of tensors count.
        kwargs: Example keyword arguments.
        size: Length of the tp axis.
        excluded: Parameters that code outside the block uses, too; they stay replicated.
        by_hand: Name of a parameter -> role, where the user has decided.
        sequence_parallel: Whether to cut the input along its sequence, where that is possible.
        unread: Leaves of its output, by position, that nothing reads.

    Returns:
        A plan; it replicates the whole block, with the reason, if nothing can be sharded or followed.
    """
    if size == 1:
        return replicated_plan(block, size=size, reason="the tp axis has one rank")
    replicated = {
        fqn: "shared with code outside the block"
        for fqn, parameter in named_parameters(block).items()
        if any(parameter is other for other in excluded)
    }
    replicated |= {fqn: "by tensor.plan" for fqn, role in by_hand.items() if role == "replicate"}
    try:
        follow = partial(
            follow_block,
            block,
            args,
            kwargs,
            size=size,
            by_hand=by_hand,
            sequence_parallel=sequence_parallel,
            unread=unread,
        )
        find = partial(_find, parameters=named_parameters(block), size=size, replicated=replicated, by_hand=by_hand)
        best = _with_sums_deferred(find, follow, find(follow))
    except Exception as error:  # the block's own code on fake tensors can raise anything; it then runs unsharded
        message = next(iter(str(error).splitlines()), "")
        reason = f"can't be followed on fake tensors: {type(error).__name__}: {message}"
        return replicated_plan(block, size=size, reason=reason)
    return _plan(block, best, size)


def _find(
    follow: Callable[..., Followed],
    *,
    parameters: Mapping[str, nn.Parameter],
    size: int,
    replicated: dict[str, str],
    by_hand: Mapping[str, Role],
) -> Followed:
    group = _giving_way(lambda kept: _group(partial(follow, replicated=kept), parameters, size), by_hand)
    return _improve(group, size, replicated, by_hand)


def _with_sums_deferred(
    find: Callable[[Callable[..., Followed]], Followed], follow: Callable[..., Followed], best: Followed
) -> Followed:
    """Where outputs of stacked weights are gathered, as that sends less than an all-reduce: reduce them later instead.

    Elsewhere that would send less, too, but takes one more (small) all-reduce in the backward, for the scores.
    """
    if all(c.row is not None or c.sources.isdisjoint(best.stacked) for c in best.communications):
        return best
    try:
        deferred = find(partial(follow, defers_sums=True))
    except PlanError:  # it changes such a sum in place
        return best
    return deferred if deferred.communicated_bytes < best.communicated_bytes else best


def _group(follow: Callable[..., Followed], parameters: Mapping[str, nn.Parameter], size: int) -> Followed:
    """Shard fused weights part by part, where that lowers the communicated bytes.

    Weights that the block cuts itself (``weight.chunk(3)``) come first, as they are else not sharded at all.
    """
    part_sizes: dict[str, tuple[int, ...]] = {}
    best = follow(part_sizes=part_sizes)
    cut = {fqn: _sizes(parameters[fqn].shape[0], edges, size) for fqn, edges in best.weight_cuts.items()}
    if known := {fqn: sizes for fqn, sizes in cut.items() if sizes is not None}:
        part_sizes, best = known, follow(part_sizes=known)
    tried: set[object] = set()
    while candidate := next((c for c in _groupings(best, part_sizes, size) if _frozen(c) not in tried), None):
        tried.add(_frozen(candidate))
        trial = follow(part_sizes=part_sizes | candidate)
        if trial.communicated_bytes < best.communicated_bytes:
            part_sizes, best = part_sizes | candidate, trial
    return best


def _groupings(
    followed: Followed, part_sizes: Mapping[str, tuple[int, ...]], size: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Parts of the weights whose outputs are gathered: where the block cuts them, then where it views them in parts."""
    gathered = [c.sources for c in followed.communications if c.row is None and c.kind != "all-reduce"]
    for cuts in (_joined(followed.cuts), followed.view_cuts):
        for cut in cuts:
            if not any(cut.sources & sources for sources in gathered):
                continue
            candidate = {}
            for fqn in cut.sources:
                edges = {0, *accumulate(part_sizes.get(fqn, ())), *cut.edges}
                if (sizes := _sizes(max(cut.features, *edges), edges, size)) is not None:
                    candidate[fqn] = sizes
            if candidate.keys() == cut.sources:
                yield candidate


def _joined(cuts: Sequence[Cut]) -> Sequence[Cut]:
    """Cuts of the same features in several calls, as by slices, in one."""
    edges: dict[tuple[frozenset[str], int], frozenset[int]] = {}
    for cut in cuts:
        edges[cut.sources, cut.features] = edges.get((cut.sources, cut.features), frozenset()) | cut.edges
    return [Cut(sources=sources, features=features, edges=e) for (sources, features), e in edges.items()]


def _sizes(features: int, edges: Collection[int], size: int) -> tuple[int, ...] | None:
    """The sizes of the parts between edges; None if a part does not divide, or if there is only one."""
    sizes = tuple(stop - start for start, stop in pairwise(sorted({0, features, *edges})))
    return sizes if len(sizes) > 1 and not any(length % size for length in sizes) else None


def _frozen(candidate: Mapping[str, tuple[int, ...]]) -> object:
    return frozenset(candidate.items())


def _giving_way(follow: Follow, by_hand: Mapping[str, Role]) -> Follow:
    """The same, with weights replicated whose outputs are changed in place as shards can't be."""
    changed: dict[str, str] = {}

    def followed(replicated: dict[str, str]) -> Followed:
        while True:
            try:
                return follow(changed | replicated)
            except ChangedInPlace as error:
                sources = error.sources.difference(by_hand, changed, replicated)
                if not sources:
                    raise
                changed.update(dict.fromkeys(sources, str(error)))

    return followed


def _improve(follow: Follow, size: int, replicated: dict[str, str], by_hand: Mapping[str, Role]) -> Followed:
    """Replicate groups of weights where that lowers the communicated bytes and is worth it."""
    best = follow(replicated)
    if fewer := best.uneven_heads.difference(by_hand):  # as Megatron does with few key and value heads
        candidate = replicated | dict.fromkeys(fewer, f"its heads are not divisible by {size}")
        trial = follow(candidate)
        if trial.communicated_bytes < best.communicated_bytes:
            best, replicated = trial, candidate
    best = _without_doubtful(follow, best, size, replicated, by_hand)
    gathers = [c for c in best.communications if c.row is None and c.sources.difference(by_hand)]
    if gathers:  # residuals on shards may be in the way of a better plan
        largest = max(gathers, key=lambda gather: gather.num_bytes)
        candidate = replicated | _reasons(largest, by_hand)
        trial = _without_doubtful(follow, follow(candidate), size, candidate, by_hand)
        if trial.communicated_bytes < best.communicated_bytes:
            best = max(trial, best, key=lambda followed: followed.num_sharded_elements)
    return best


def _without_doubtful(
    follow: Callable[[dict[str, str]], Followed],
    best: Followed,
    size: int,
    replicated: dict[str, str],
    by_hand: Mapping[str, Role],
) -> Followed:
    """Replicate one doubtful group of weights after the other, where that lowers the communicated bytes."""
    tried: set[frozenset[str]] = {frozenset()}
    while doubt := next((d for d in _doubtful(best, size) if d.sources.difference(by_hand) not in tried), None):
        tried.add(doubt.sources.difference(by_hand))
        candidate = replicated | _reasons(doubt, by_hand)
        trial = follow(candidate)
        if trial.communicated_bytes < best.communicated_bytes:
            best, replicated, tried = trial, candidate, {frozenset()}  # what did not pay before may pay now
    return best


def _reasons(communication: Communication, by_hand: Mapping[str, Role]) -> dict[str, str]:
    """Why the weights that a communication comes from are replicated."""
    reason = f"its output would need an {communication.kind} of {communication.num_bytes} bytes at {communication.call}"
    return dict.fromkeys(communication.sources.difference(by_hand), reason)


def _doubtful(followed: Followed, size: int) -> Iterator[Communication]:
    """The communications that may cost more than the sharding is worth; those that give up least come first."""

    def outputs_of(communication: Communication) -> int:
        return sum(followed.output_bytes.get(fqn, 0) for fqn in communication.sources)

    for communication in sorted(followed.communications, key=outputs_of):
        outputs = outputs_of(communication)
        if not communication.sources or not communication.sources.isdisjoint(followed.stacked):
            continue
        if communication.row is None:
            if 2 * communication.num_bytes >= _gather_bytes(outputs, size):
                yield communication
        elif communication.num_bytes > _gather_bytes(outputs + followed.output_bytes[communication.row], size):
            yield communication


def _gather_bytes(num_bytes: int, size: int) -> int:
    return num_bytes * (size - 1) // size


def _plan(block: nn.Module, followed: Followed, size: int) -> BlockTensorPlan:
    if all(weight.shard_dim is None for weight in followed.weights):
        reasons = [f"{weight.fqn}: {weight.reason}" for weight in followed.weights]
        reason = f"no weight can be sharded ({'; '.join(reasons[:4])}{'; ...' if len(reasons) > 4 else ''})"
        return BlockTensorPlan(size=size, weights=followed.weights, reason=reason)
    all_reduces = sum(communication.kind == "all-reduce" for communication in followed.communications)
    return BlockTensorPlan(
        size=size,
        weights=followed.weights,
        num_all_reduces_forward=all_reduces,
        is_sequence_parallel=followed.is_sequence_parallel,
        defers_sums=followed.defers_sums,
        unread=followed.unread,
        num_all_reduces_backward=followed.num_column_inputs,
        num_other_collectives_forward=len(followed.communications) - all_reduces,
        communicated_bytes=followed.communicated_bytes,
    )
