"""Finding the tensor-parallel plan of a block: simulate it, and take back what costs more than it is worth.

A block runs twice, unsharded for a record of its calls, and as planned; between, `replay` tells what each try would
communicate.

The first try shards all that it can (`simulate`): a column weight for each replicated activation, a row weight for each
sharded one, which for an ordinary transformer block is Megatron's plan (Shoeybi et al. 2019,
https://arxiv.org/abs/1909.08053). Fused weights are then sharded part by part (`placement`). Last, each sharding that
communicates too much is tried without it:

* an activation that is gathered, unless it is small beside the outputs that it comes from;
* a column-row pair whose all-reduce sends more than gathering the outputs of both weights would (narrow waists, LoRA).

Stacked weights of experts stay sharded all the same: replicated, each rank would hold all experts for what a few tokens
send.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from types import MappingProxyType

from torch import nn

from lightning_3d.sharding.axis import sent_bytes
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan, Role, replicated_plan
from lightning_3d.tensor.plan.known_choices import KnownChoice
from lightning_3d.tensor.plan.planned_axis import PlannedCollective
from lightning_3d.tensor.plan.record import record_block
from lightning_3d.tensor.plan.replay import replay
from lightning_3d.tensor.plan.simulate import ChangedInPlace, Choice, Cut, Simulated, Terms, simulate_block
from lightning_3d.tensor.plan.weights import named_parameters

Simulate = Callable[[dict[str, str]], Simulated]
"""Simulates a block in which some weights must not be sharded: FQN -> reason."""

PartSizes = dict[str, tuple[int, ...]]
"""FQN -> sizes of the parts of a weight's output features."""


def plan_block(
    block: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    size: int,
    excluded: Collection[nn.Parameter] = frozenset(),
    by_hand: Mapping[str, Role] = MappingProxyType({}),
    sequence_parallel: bool = False,
    unused_outputs: frozenset[int] = frozenset(),
) -> BlockTensorPlan:
    """Decide for every parameter of a block whether and how it is sharded over `size` tensor-parallel ranks.

    No process group, no collective, no memory for tensors; the block is left as it was. What was found for such a block
    before is taken from the user's cache folder (`known_choices`).

    Args:
        block: On any device, meta included. Its ``forward`` runs, its hooks do not.
        args: Example arguments of its forward, real, fake or meta: only shape, dtype and device of tensors count.
        kwargs: Example keyword arguments.
        size: Length of the tp axis.
        excluded: Parameters that code outside the block uses, too; they stay replicated.
        by_hand: Name of a parameter -> role, where the user has decided.
        sequence_parallel: Whether to cut the input along its sequence, where that is possible.
        unused_outputs: Leaves of its output, by position, that nothing reads.

    Returns:
        A plan; it replicates the whole block, with the reason, if nothing can be sharded or simulated.
    """
    if size == 1:
        return replicated_plan(block, size=size, reason="the tp axis has one rank")
    replicated = {
        fqn: "shared with code outside the block"
        for fqn, parameter in named_parameters(block).items()
        if any(parameter is other for other in excluded)
    }
    replicated |= {fqn: "by tensor.plan" for fqn, role in by_hand.items() if role == "replicate"}
    search = _Search(size=size, parameters=named_parameters(block), replicated=replicated, by_hand=by_hand)
    terms = Terms(size=size, by_hand=by_hand, sequence_parallel=sequence_parallel, unused_outputs=unused_outputs)
    known = KnownChoice(block, (tuple(args), dict(kwargs)), terms, replicated)

    def planned(choice: Choice) -> BlockTensorPlan:
        return _plan(simulate_block(block, args, kwargs, choice=choice, terms=terms), size)

    if (plan := known.plan(planned)) is not None:
        return plan
    try:
        found = search.run(partial(replay, record_block(block, args, kwargs), terms=terms))
        plan = planned(found.choice)
    except Exception as error:  # the block's own code on fake tensors can raise anything; it then runs unsharded
        message = next(iter(str(error).splitlines()), "")
        reason = f"can't be followed on fake tensors: {type(error).__name__}: {message}"
        return replicated_plan(block, size=size, reason=reason)
    known.keep(found.choice, plan)
    return plan


@dataclass(frozen=True, kw_only=True, slots=True)
class _Search:
    """The ways to a better plan of one block; each takes a simulation that leaves a choice open, and makes it."""

    size: int

    parameters: Mapping[str, nn.Parameter]

    replicated: dict[str, str]
    """FQN -> reason, for weights that must not be sharded."""

    by_hand: Mapping[str, Role]
    """FQN -> role, for weights that the search leaves alone."""

    def run(self, simulate: Callable[..., Simulated]) -> Simulated:
        """Find the best plan; `simulate` takes a `choice`."""
        return self._improve(self._replication_candidates(partial(self._group, simulate)))

    def _group(self, simulate: Callable[..., Simulated], replicated: dict[str, str]) -> Simulated:
        """Shard fused weights part by part, where that lowers the communicated bytes.

        Weights that the block cuts itself (``weight.chunk(3)``) come first, as they are else not sharded at all.
        """
        best, part_sizes = simulate(choice=Choice(replicated=replicated)), PartSizes()
        for fqn, edges in best.weight_cuts.items():
            if (sizes := _sizes(self.parameters[fqn].shape[0], edges, self.size)) is not None:
                part_sizes[fqn] = sizes
        if part_sizes:
            best = simulate(choice=Choice(replicated=replicated, part_sizes=part_sizes))
        tried: list[PartSizes] = []
        while candidate := next((c for c in _groupings(best, part_sizes, self.size) if c not in tried), None):
            tried.append(candidate)
            trial = simulate(choice=Choice(replicated=replicated, part_sizes=part_sizes | candidate))
            if trial.communicated_bytes < best.communicated_bytes:
                part_sizes, best = part_sizes | candidate, trial
        return best

    def _replication_candidates(self, simulate: Simulate) -> Simulate:
        """Retry with weights replicated whose outputs meet an in-place operator that shards have no form of."""
        changed: dict[str, str] = {}

        def simulated(replicated: dict[str, str]) -> Simulated:
            while True:
                try:
                    return simulate(changed | replicated)
                except ChangedInPlace as error:
                    sources = error.sources.difference(self.by_hand, changed, replicated)
                    if not sources:
                        raise
                    changed.update(dict.fromkeys(sources, str(error)))

        return simulated

    def _improve(self, simulate: Simulate) -> Simulated:
        """Replicate groups of weights where that lowers the communicated bytes and is worth it."""
        replicated, best = self.replicated, simulate(self.replicated)
        if fewer := best.few_heads.difference(self.by_hand):  # as Megatron does with few key and value heads
            candidate = replicated | dict.fromkeys(fewer, f"it has fewer heads than {self.size}")
            trial = simulate(candidate)
            if trial.communicated_bytes < best.communicated_bytes:
                best, replicated = trial, candidate
        best = self._without_doubtful(simulate, best, replicated)
        gathers = [caused for caused in best.forward if caused.cause.row is None and self._sources(caused)]
        if gathers:  # residuals on shards may be in the way of a better plan
            candidate = replicated | self._reasons(max(gathers, key=lambda gather: gather.collective.num_bytes))
            trial = self._without_doubtful(simulate, simulate(candidate), candidate)
            if _shards_more_for_less(trial, best):
                best = trial
        return best

    def _without_doubtful(self, simulate: Simulate, best: Simulated, replicated: dict[str, str]) -> Simulated:
        """Replicate the weights behind doubtful collectives where that lowers the bytes of both directions.

        Collectives that are alike, as those of the many layers of a stage, are tried together, and then one alone.
        """
        tried: set[frozenset[str]] = {frozenset()}
        while alike := _alike([d for d in _doubtful(best, self.size) if self._sources(d) not in tried], best):
            are_apart = len({self._sources(doubt) for doubt in alike}) > 1
            for doubts in (alike, alike[:1]) if are_apart else (alike,):
                candidate = replicated | {fqn: why for doubt in doubts for fqn, why in self._reasons(doubt).items()}
                trial = simulate(candidate)
                if trial.communicated_bytes < best.communicated_bytes:
                    best, replicated, tried = trial, candidate, {frozenset()}  # what did not pay before may pay now
                    break
            else:
                tried.update(self._sources(doubt) for doubt in alike)
        return best

    def _sources(self, caused: PlannedCollective) -> frozenset[str]:
        """The weights that a collective comes from, but for those decided by hand."""
        return caused.cause.sources.difference(self.by_hand)

    def _reasons(self, caused: PlannedCollective) -> dict[str, str]:
        """Why the weights that a collective comes from are replicated."""
        made = caused.collective
        reason = f"its output would need an {made.kind} of {made.num_bytes} bytes at {made.call}"
        return dict.fromkeys(self._sources(caused), reason)


def _groupings(simulated: Simulated, part_sizes: PartSizes, size: int) -> Iterator[PartSizes]:
    """Parts of the weights whose outputs are gathered: where the block cuts them, then where it views them in parts."""
    gathered = [c.cause.sources for c in simulated.forward if c.cause.row is None and c.collective.kind != "all-reduce"]
    for cut in (*_joined(simulated.cuts), *simulated.view_cuts):
        if not any(cut.sources & sources for sources in gathered):
            continue
        candidate = PartSizes()
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


def _shards_more_for_less(trial: Simulated, best: Simulated) -> bool:
    """Whether a plan shards no less, and sends no more bytes per element that it shards."""
    more = trial.num_sharded_elements >= best.num_sharded_elements
    per_element = trial.communicated_bytes * best.num_sharded_elements
    return more and per_element < best.communicated_bytes * trial.num_sharded_elements


def _alike(doubts: Sequence[PlannedCollective], simulated: Simulated) -> Sequence[PlannedCollective]:
    """The first of some collectives, and those like it: of the same call and size, and for as large outputs."""

    def kind(caused: PlannedCollective) -> object:
        return caused.collective, simulated.bytes_behind(caused), caused.cause.row is None

    return [doubt for doubt in doubts if kind(doubt) == kind(doubts[0])]


def _doubtful(simulated: Simulated, size: int) -> Iterator[PlannedCollective]:
    """The collectives that may cost more than the sharding is worth; those that give up least come first."""
    for caused in sorted(simulated.forward, key=simulated.bytes_behind):
        outputs, num_bytes, cause = simulated.bytes_behind(caused), caused.collective.num_bytes, caused.cause
        if not cause.sources or not cause.sources.isdisjoint(simulated.stacked):
            continue
        if cause.row is None:
            if 2 * num_bytes >= sent_bytes("all-gather", outputs, size):
                yield caused
        elif num_bytes > sent_bytes("all-gather", outputs + simulated.output_bytes[cause.row], size):
            yield caused


def _plan(simulated: Simulated, size: int) -> BlockTensorPlan:
    if all(weight.shard_dim is None for weight in simulated.weights):
        reasons = [f"{weight.fqn}: {weight.reason}" for weight in simulated.weights]
        reason = f"no weight can be sharded ({'; '.join(reasons[:4])}{'; ...' if len(reasons) > 4 else ''})"
        return BlockTensorPlan(size=size, weights=simulated.weights, reason=reason)
    return BlockTensorPlan(
        size=size,
        weights=simulated.weights,
        collectives=tuple(caused.collective for caused in (*simulated.forward, *simulated.backward)),
        is_sequence_parallel=simulated.is_sequence_parallel,
        data_dependent_routing=simulated.data_dependent_routing,
        unused_outputs=simulated.unused_outputs,
    )
