"""Running a block on fake tensors, as every rank would run its part of it, to see what that would communicate.

The interpreter is the one that runs blocks on shards (`interpret`), over an axis that exists only on paper. Weights are
decided on the way, each at its first use (`weights`). So what is planned is what runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import PlanError
from lightning_3d.model.block_runner import is_own
from lightning_3d.sharding.placement import Placement, Sharded
from lightning_3d.sharding.rules import channelwise
from lightning_3d.sharding.rules.aliases import alias_dims
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.channelwise import as_channel_call
from lightning_3d.sharding.rules.contraction import as_contraction
from lightning_3d.sharding.rules.convolution import as_convolution
from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.rules.projection import as_projection
from lightning_3d.sharding.rules.views import SEPARATE, cut_pieces, num_parts_of, viewed_shape
from lightning_3d.sharding.sharded_tensor import ShardedTensor, SourceWeights, shard_dim
from lightning_3d.tensor.interpreter import TensorInterpreter
from lightning_3d.tensor.plan.assumed_values import AssumedValues, without_data
from lightning_3d.tensor.plan.block_plan import Role, WeightPlan
from lightning_3d.tensor.plan.fakes import on_fakes
from lightning_3d.tensor.plan.planned_axis import PlannedAxis, PlannedCollective
from lightning_3d.tensor.plan.weights import Weights, sources_of
from lightning_3d.tensor.sequence import cut_sequence
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.pytree import tree_leaves


class ChangedInPlace(PlanError):
    """A call changes a sharded tensor in place and has no sharded form; `sources`: the column weights it comes from."""

    def __init__(self, call: str, sources: frozenset[str]) -> None:
        super().__init__(f"{call} changes its output in place and has no sharded form")
        self.sources = sources


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A call that separates features of column weights."""

    sources: frozenset[str]
    """The weights' FQNs."""

    features: int
    """The end of the features in question."""

    edges: frozenset[int]
    """Where features are separated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The settings that all tries of a block's plan share, as for `plan_block`."""

    size: int

    by_hand: Mapping[str, Role] = field(default_factory=dict)

    sequence_parallel: bool = False

    unused_outputs: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The decisions that a simulation leaves to its caller."""

    replicated: Mapping[str, str]
    """FQN -> reason, for weights that must not be sharded."""

    part_sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """FQN -> sizes of the parts of its output features, for weights that are sharded part by part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """The course of one run of a block."""

    choice: Choice
    """The decisions that it was given."""

    weights: tuple[WeightPlan, ...]
    """By parameter name, ties under every name."""

    forward: tuple[PlannedCollective, ...]
    """Its collectives, in order."""

    backward: tuple[PlannedCollective, ...]

    is_sequence_parallel: bool
    """Whether the input was cut along its sequence."""

    data_dependent_routing: bool
    """Whether it read data, or picked experts by it."""

    unused_outputs: frozenset[int]
    """Leaves of the output, by position, that are on shards and that nothing reads."""

    output_bytes: Mapping[str, int]
    """FQN of a column or row weight -> bytes of the full outputs of its uses."""

    stacked: Collection[str]
    """FQNs of stacks of matrices that each see a part of the input, as those of experts do."""

    weight_cuts: Mapping[str, Collection[int]]
    """FQN -> where the block cuts the weight itself along its first dim."""

    cuts: tuple[Cut, ...]
    """Where it cuts features of column weights."""

    view_cuts: tuple[Cut, ...]
    """Where it views them as several parts, heads among them."""

    few_heads: frozenset[str]
    """FQNs of column weights whose features it views as fewer heads than there are ranks."""

    @property
    def communicated_bytes(self) -> int:
        """Bytes that each rank sends in one forward and backward."""
        return sum(caused.collective.num_bytes for caused in (*self.forward, *self.backward))

    def bytes_behind(self, caused: PlannedCollective) -> int:
        """Bytes of the full outputs of the column weights that a collective comes from."""
        return sum(self.output_bytes.get(fqn, 0) for fqn in caused.cause.sources)

    @property
    def num_sharded_elements(self) -> int:
        """Elements of the parameters that are sharded, before sharding."""
        return sum(weight.num_elements for weight in self.weights if weight.shard_dim is not None)


def simulate_block(
    block: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    choice: Choice,
    terms: Terms,
) -> Simulated:
    """Run a block's forward on fake tensors and see where its weights can be sharded and what that communicates.

    Raises:
        ChangedInPlace: a call changes a sharded tensor in place and has no sharded form.
        Exception: whatever the block raises on fake tensors.
    """
    axis = PlannedAxis(terms.size)
    with on_fakes(block, args, kwargs) as fakes, torch.enable_grad():

        def shard(weight: Tensor, placement: Sharded) -> ShardedTensor:
            return ShardedTensor(placement.own(weight, axis.size, axis.rank), axis, placement, is_weight=True)

        weights = Weights(fakes.parameters, choice.replicated, terms.by_hand, choice.part_sizes, axis, shard)
        own_args, sequence = cut_sequence(fakes.args, axis) if terms.sequence_parallel else (fakes.args, None)
        simulation = Simulation(weights, axis, sequence)
        seen = custom_functions_seen(simulation.on_custom_function)
        assumed = AssumedValues()
        with assumed, axis.caused_by(call="running statistics"), simulation.statistics, simulation, seen:
            output = block.forward(*own_args, **fakes.kwargs)
        with axis.caused_by(call="buffers that it sets"):
            simulation.make_buffers_whole(block.modules())
        leaves = tree_leaves(output)
        unused_outputs = terms.unused_outputs & {i for i, leaf in enumerate(leaves) if shard_dim(leaf) is not None}
        with axis.caused_by(call="the block's output"):
            outputs = tree_leaves(simulation.gathered(output, unused_outputs))
        backward = axis.backward_of(
            leaf for i, leaf in enumerate(outputs) if isinstance(leaf, Tensor) and i not in unused_outputs
        )
    return simulation.simulated(choice, backward, unused_outputs, read_data=assumed.were_read)


class Simulation(TensorInterpreter):
    """Decides weights at their first use, and follows which weights the sharding of a tensor comes from."""

    axis: PlannedAxis
    sees_all = True

    def __init__(self, weights: Weights, axis: PlannedAxis, sequence: torch.Size | None) -> None:
        super().__init__(axis, sequence)
        self.output_bytes: dict[str, int] = {}
        self.cuts: list[Cut] = []
        self.view_cuts: list[Cut] = []
        self.few_heads: set[str] = set()
        self.weights = weights

    def simulated(
        self, choice: Choice, backward: Sequence[PlannedCollective], unused_outputs: frozenset[int], *, read_data: bool
    ) -> Simulated:
        """The course of the run, once it has ended."""
        return Simulated(
            choice=choice,
            weights=self.weights.plans(),
            forward=tuple(self.axis.forward),
            backward=tuple(backward),
            is_sequence_parallel=self.sequence is not None,
            data_dependent_routing=read_data or bool(self.weights.stacked),
            unused_outputs=unused_outputs,
            output_bytes=self.output_bytes,
            stacked=self.weights.stacked,
            weight_cuts=self.weights.cuts,
            cuts=tuple(self.cuts),
            view_cuts=tuple(self.view_cuts),
            few_heads=frozenset(self.few_heads),
        )

    def dispatch(self, call: TorchCall) -> Any:
        """Also decide the weights of the call, if this is their first use, and follow where they go."""
        call = TorchCall(without_data(call.function), call.name, call.args, call.kwargs)
        with self.axis.caused_by(call=call.name):
            self.weights.cut(call)
            self.weights.join_features(call)
            self._decide(call)
            if (made := self.weights.make_aliases(call, self.run_plain)) is not None:
                return made
            own = call.mapped(self.weights.sharded) if self.weights.are_in(call) else call
            self._note_cuts(own, own.first)
            output = super().dispatch(own)
        self.weights.finalize_uses(call.name, call.tensors, output)
        return output

    def _decide(self, call: TorchCall) -> None:
        if (projection := as_projection(call) or as_convolution(call)) is not None:
            self.weights.decide(projection)
        elif (contraction := as_contraction(call, self.weights.is_weight)) is not None:
            self.weights.decide_contraction(contraction)
        elif call.name in channelwise.NAMES:
            channels = as_channel_call(call, self.axis.size)
            for vector in () if channels is None or channels.dim is None else channels.vectors:
                self.weights.shard_vector(vector, vector.numel())

    def on_custom_function(
        self, cls: type[torch.autograd.Function], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run it as on shards, with the weights as decided so far."""
        if is_own(cls.__module__):
            return function(*args, **kwargs)
        call = TorchCall(function, cls.__name__, args, kwargs)
        own = call.mapped(self.weights.sharded)
        with self.axis.caused_by(call=call.name):
            output = super().on_custom_function(cls, function, own.args, own.kwargs)
        self.weights.finalize_uses(call.name, call.tensors, output)
        return output

    def refuse_change(self, call: TorchCall, tensor: Tensor) -> None:
        """Raise `ChangedInPlace`."""
        raise ChangedInPlace(call.name, sources_of(tensor))

    # ------------------------------------------------------------------------------------ where sharding comes from

    def execute(self, call: TorchCall, local: LocalCall) -> Any:
        """Also note how much a weight's uses give, and which weights are stacks."""
        if local.makes_weight and None in (alias_dims(call) or ()):
            self.weights.stacked.update(sources_of(local.tensors[0]))
        output = super().execute(call, local)
        if local.weight is not None:
            fqn = self.weights.fqn_of(local.weight)
            self.output_bytes[fqn] = self.output_bytes.get(fqn, 0) + output.nbytes
        return output

    def wrap(self, result: Tensor, placement: Placement, local: LocalCall, start: int) -> Tensor:
        """Also note the origin."""
        made = super().wrap(result, placement, local, start)
        if isinstance(made, ShardedTensor) and made.source_weights is None:
            own = _own(local)
            made.source_weights = SourceWeights(
                _sources(own), start + _start_of(own, made, is_piece=bool(local.offsets))
            )
        return made

    def sum(self, summand: Tensor, local: LocalCall) -> Tensor:
        """Also note the cause."""
        sources = _sources([tensor for tensor in _own(local) if tensor is not local.weight])
        row = None if local.weight is None else self.weights.fqn_of(local.weight)
        with self.axis.caused_by(sources=sources, row=row):
            made = super().sum(summand, local)
        if isinstance(made, ShardedTensor):  # a slice of the sequence, which comes from no weight
            made.source_weights = SourceWeights(frozenset())
        return made

    def moved(self, tensor: ShardedTensor, target: Placement) -> Tensor:
        """Also note the cause."""
        with self.axis.caused_by(sources=sources_of(tensor)):
            return super().moved(tensor, target)

    def _note_cuts(self, call: TorchCall, tensor: object) -> None:
        """Note where a call separates the features of column weights in its first argument, which is `tensor` now."""
        dim = shard_dim(tensor)
        if (
            call.name not in SEPARATE
            or not isinstance(tensor, ShardedTensor)
            or dim is None
            or tensor.source_weights is None
        ):
            return
        source_weights, length = tensor.source_weights, tensor.shape[dim]
        is_whole = source_weights.start == 0 and self.weights.have_features(source_weights.sources, length)
        if dim != tensor.dim() - 1 and not is_whole:
            return
        pieces = cut_pieces(call, dim)
        edges = {edge for piece in pieces for edge in piece} if pieces is not None else set()
        notes = self.cuts
        if pieces is None and (shape := viewed_shape(call)) is not None:
            is_opened = len(shape) > tensor.dim() and shape[:dim] == tensor.shape[:dim] and call.name != "unsqueeze"
            if is_opened and shape[dim] < self.axis.size:
                self.few_heads |= source_weights.sources
            num_parts, notes = num_parts_of(tuple(tensor.shape), shape, dim), self.view_cuts
            edges = set(range(0, length, length // num_parts))
        if len(edges) > 1:
            absolute = frozenset(source_weights.start + edge for edge in edges)
            notes.append(Cut(sources=source_weights.sources, features=source_weights.start + length, edges=absolute))


def _own(local: LocalCall) -> list[ShardedTensor]:
    """The sharded operands of which every rank reads its own part, wherever that has come from."""
    pairs = zip(local.tensors, local.input_placements, strict=True)
    return [tensor for tensor, at in pairs if isinstance(tensor, ShardedTensor) and isinstance(at, Sharded)]


def _sources(tensors: Sequence[ShardedTensor]) -> frozenset[str]:
    return frozenset[str]().union(
        *(tensor.source_weights.sources for tensor in tensors if tensor.source_weights is not None)
    )


def _start_of(own: Sequence[ShardedTensor], made: ShardedTensor, *, is_piece: bool) -> int:
    """The feature with which the first operand begins, if the result has the same features or is a piece of them."""
    if not own or own[0].source_weights is None:
        return 0
    is_same = own[0].shape[own[0].placement.dim] == made.shape[made.placement.dim]
    return own[0].source_weights.start if is_piece or is_same else 0
