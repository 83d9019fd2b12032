"""Following placements through one run of a block on fake tensors.

[Note: replicated is plain]
Inside a block a replicated tensor is a plain tensor and only a sharded one is a DTensor. Calls on plain tensors alone
are the user's own, untouched. Sharding begins where a plain activation meets a column weight, lives through the calls
that DTensor can run on shards, and ends at a row weight (an all-reduce) or, at a price, at a call that has no sharded
form (an all-gather). What is only partially reduced is reduced at once.

         plain          sharded                                  plain
    x ---------> column ---------> view, attention, gelu, ... ---------> row, all-reduce --> y

Here the same is done on fake tensors with full shapes and a table of placements beside them (`ledger`);
`sharded_calls` does it with DTensors. Both read the calls through `reading`, and DTensor's own rules (`rules`) say what
DTensor will do. Weights are decided on the way (`weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import PlanError
from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.plan.block_plan import Role, WeightPlan
from lightning_3d.tensor.plan.fakes import on_fakes
from lightning_3d.tensor.plan.followed_uses import FollowedUses
from lightning_3d.tensor.plan.ledger import Communication, Ledger
from lightning_3d.tensor.plan.representative import RepresentativeValues
from lightning_3d.tensor.plan.weights import Weights
from lightning_3d.tensor.rules.attention import Attention, as_attention, attention_dim, mask_dim
from lightning_3d.tensor.rules.channelwise import ChannelCall, as_channel_call
from lightning_3d.tensor.rules.dropout import as_dropout
from lightning_3d.tensor.rules.experts_matmul import without_data
from lightning_3d.tensor.rules.function import (
    Function,
    batched_matmul_dim,
    destination,
    function_name,
    is_batched_matmul,
    new_shape,
    runs_whole,
    simplified,
    takes_every_nth,
    tensors_in,
)
from lightning_3d.tensor.rules.gated import gated
from lightning_3d.tensor.rules.grouped import (
    Cuts,
    Drops,
    Keeps,
    Opens,
    Reads,
    Reshapes,
    as_grouped_call,
    as_merge,
    as_repetition,
    cut_pieces,
    num_parts_of,
    viewed_shape,
)
from lightning_3d.tensor.rules.multihead import is_multi_head_attention, multi_head_attention
from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM, sequence_input
from lightning_3d.torch_internals.dtensor_rules import NoRule, ShardingRules
from lightning_3d.torch_internals.modes import TorchDispatchMode
from lightning_3d.torch_internals.operators import OpOverload
from lightning_3d.torch_internals.pytree import tree_leaves

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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
class Followed:
    """What one run of a block showed."""

    weights: tuple[WeightPlan, ...]
    """By parameter name, ties under every name."""

    communications: tuple[Communication, ...]
    """In the order of the forward."""

    num_column_inputs: int
    """Distinct replicated activations that enter column weights: each is one all-reduce in the backward."""

    is_sequence_parallel: bool
    """Whether the input was cut along its sequence."""

    defers_sums: bool
    """Whether what row weights of experts give was reduced later (`partial_sums`)."""

    unread: frozenset[int]
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

    uneven_heads: frozenset[str]
    """FQNs of column weights whose features it views as a number of heads that the ranks do not divide."""

    @property
    def communicated_bytes(self) -> int:
        """Bytes that each rank sends in one forward."""
        return sum(communication.num_bytes for communication in self.communications)

    @property
    def num_sharded_elements(self) -> int:
        """Of the parameters."""
        return sum(weight.num_elements for weight in self.weights if weight.shard_dim is not None)


def follow_block(
    block: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    size: int,
    replicated: Mapping[str, str],
    by_hand: Mapping[str, Role] = MappingProxyType({}),
    part_sizes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    sequence_parallel: bool = False,
    defers_sums: bool = False,
    unread: frozenset[int] = frozenset(),
) -> Followed:
    """Run a block's forward on fake tensors and see where its weights can be sharded and what that communicates.

    Args:
        block: On any device, meta included; it is left as it was.
        args: Positional arguments of its forward; only the metadata of tensors counts.
        kwargs: Keyword arguments of its forward.
        size: Length of the tp axis.
        replicated: FQN -> reason, for weights that must not be sharded.
        by_hand: FQN -> column or row, for weights whose role is given.
        part_sizes: FQN -> sizes of the parts of its output features, for weights that are sharded part by part.
        sequence_parallel: Whether to cut the input along its sequence.
        defers_sums: Whether what row weights of experts give is reduced later (`partial_sums`).
        unread: Leaves of the output, by position, that nothing reads.

    Raises:
        ChangedInPlace: a call changes a sharded tensor in place and has no sharded form.
        Exception: whatever the block raises on fake tensors.
    """
    rules, ledger = ShardingRules(size), Ledger(size)
    with on_fakes(block, args, kwargs) as fakes, torch.enable_grad():
        weights = Weights(fakes.parameters, replicated, by_hand, part_sizes, ledger)
        sequence = sequence_input(fakes.args, size) if sequence_parallel else None
        if sequence is not None:
            ledger.put(sequence, Shard(SEQUENCE_DIM), frozenset())
        uses = FollowedUses(weights, ledger, None if sequence is None else sequence.shape, defers_sums=defers_sums)
        follower = _FollowCalls(weights, rules, ledger, uses)
        with RepresentativeValues(), _FollowOps(follower), follower:
            output = block.forward(*fakes.args, **fakes.kwargs)
        follower.complete_statistics()
        leaves = tree_leaves(output)
        evenly = {i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and ledger.dim(leaf) is not None}
        unread &= evenly
        gathered = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in unread]
        for tensor in {id(leaf): leaf for leaf in gathered}.values():
            ledger.gather(tensor, "the block's output")
        uses.reduce_sums(gathered, "the block's output")
    return Followed(
        weights=weights.plans(),
        communications=tuple(ledger.communications),
        num_column_inputs=follower.uses.num_column_inputs,
        is_sequence_parallel=sequence is not None,
        defers_sums=defers_sums,
        unread=unread,
        output_bytes=follower.uses.output_bytes,
        stacked=weights.stacked,
        weight_cuts=weights.cuts,
        cuts=tuple(follower.cuts),
        view_cuts=tuple(follower.view_cuts),
        uneven_heads=frozenset(follower.uneven_heads),
    )


class _FollowCalls(TorchFunctionMode):
    """Sees the calls that the block makes, and through `_FollowOps` the aten ops that they consist of."""

    def __init__(self, weights: Weights, rules: ShardingRules, ledger: Ledger, uses: FollowedUses) -> None:
        super().__init__()
        self.uses = uses
        self.cuts: list[Cut] = []
        self.view_cuts: list[Cut] = []
        self.uneven_heads: set[str] = set()
        self._statistics: dict[int, Tensor] = {}
        self._weights = weights
        self._rules = rules
        self._ledger = ledger
        self._name = ""

    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if is_multi_head_attention(func, args, kwargs):
            with self:
                return multi_head_attention(*args, **kwargs)
        if func is F.glu and any(self._ledger.entry(tensor) for tensor in tensors_in((args, kwargs))):
            with self:
                return gated(*args, **kwargs)
        self._name, args = function_name(func), simplified(func, args)
        if (output := self.uses.follow(func, self._name, args, kwargs)) is not None:
            return output
        self._weights.cut(func, args, kwargs)
        self._weights.join_features(self._name, args, kwargs)
        tensors = list({id(tensor): tensor for tensor in tensors_in((args, kwargs))}.values())
        output = self._run(func, args, kwargs, tensors)
        self._weights.settle(self._name, tensors, output)
        return output

    def _run(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Any:
        ledger = self._ledger
        if not any(ledger.entry(tensor) for tensor in tensors):
            return without_data(func)(*args, **kwargs)
        if any(ledger.parts(tensor) for tensor in tensors):
            return self._call_on_parts(func, args, kwargs, tensors)
        if args and isinstance(args[0], Tensor) and (dim := ledger.dim(args[0])) is not None:
            self._note_cuts(func, args, kwargs, dim)
            if (merge := as_merge(func, args, kwargs, dim, num_ranks=ledger.size)) is not None:
                return self._put_parts(func, args, kwargs, [merge.parts], [0])
            if (repeated := as_repetition(func, args, kwargs, dim, num_ranks=ledger.size)) is not None:
                return self._put_parts(func, args, kwargs, [repeated], [0])
            is_new = new_shape(func, args, kwargs, dim) is not None
            if is_new or takes_every_nth(func, args, kwargs, dim, size=ledger.size):
                return self._locally(func, args, kwargs, dim, tensors)
        if (channels := as_channel_call(func, args, kwargs, ledger.dim, ledger.size)) is not None:
            return self._call_on_channels(func, args, kwargs, channels, tensors)
        if (attention := as_attention(func, args, kwargs)) is not None:
            return self._attend(func, args, kwargs, attention, tensors)
        if (dropout := as_dropout(func, args, kwargs)) is not None and ledger.dim(dropout.input) is not None:
            return self._locally(func, args, kwargs, ledger.dim(dropout.input), tensors)
        if is_batched_matmul(func, args, kwargs):
            dim = batched_matmul_dim(args[0], args[1], ledger.dim(args[0]), ledger.dim(args[1]))
            if dim is not None:
                return self._locally(func, args, kwargs, dim, tensors)
        return self._generic(func, args, kwargs, tensors)

    def _call_on_parts(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Any:
        """A call with a tensor in grouped order."""
        match as_grouped_call(func, args, kwargs, self._ledger.parts, self._is_plain):
            case None:
                return self._whole(func, args, kwargs, tensors, destination(func, args, kwargs))
            case Reads():
                return func(*args, **kwargs)
            case Opens() as call:
                with self._ledger.closed():
                    opened = args[0].reshape(call.shape)
                self._ledger.put(opened, Shard(call.dim), self._ledger.sources(tensors))
                return self._generic(Tensor.reshape, (opened, call.result), {}, [opened])
            case Cuts() as call:
                return self._put_parts(func, args, kwargs, call.pieces, call.starts)
            case Reshapes() | Drops() | Keeps() as call:
                return self._put_parts(func, args, kwargs, [call.parts], [0])

    def _is_plain(self, tensor: Tensor) -> bool:
        return self._ledger.entry(tensor) is None

    def _put_parts(
        self, func: Function, args: Args, kwargs: Kwargs, parts: Sequence[Parts], starts: Sequence[int]
    ) -> Any:
        """A call that every rank makes on its own parts; each result has its parts."""
        ledger = self._ledger
        entries = [entry for tensor in tensors_in((args, kwargs)) if (entry := ledger.entry(tensor)) is not None]
        sources = frozenset[str]().union(*(entry.sources for entry in entries))
        with ledger.closed():
            output = func(*args, **kwargs)
        for result, its_parts, start in zip(tensors_in(output), parts, starts, strict=True):
            ledger.put_parts(result, its_parts, sources, entries[0].start + start)
        return output

    def _note_cuts(self, func: Function, args: Args, kwargs: Kwargs, dim: int) -> None:
        """Note where a call separates the features of column weights."""
        ledger, tensor = self._ledger, args[0]
        entry = ledger.entry(tensor)
        assert entry is not None
        length = tensor.shape[dim]
        is_whole = entry.start == 0 and self._weights.have_features(entry.sources, length)
        if dim != tensor.dim() - 1 and not is_whole:
            return
        pieces = cut_pieces(func, args, kwargs, dim)
        edges = {edge for piece in pieces for edge in piece} if pieces is not None else set()
        notes = self.cuts
        if pieces is None and (shape := viewed_shape(func, args, kwargs)) is not None:
            is_opened = len(shape) > tensor.dim() and shape[:dim] == tensor.shape[:dim] and self._name != "unsqueeze"
            if is_opened and shape[dim] % ledger.size:
                self.uneven_heads |= entry.sources
            num_parts, notes = num_parts_of(tuple(tensor.shape), shape, dim), self.view_cuts
            edges = set(range(0, length, length // num_parts))
        if len(edges) > 1:
            absolute = frozenset(entry.start + edge for edge in edges)
            notes.append(Cut(sources=entry.sources, features=entry.start + length, edges=absolute))

    def _generic(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Any:
        """A call as DTensor runs it; on full tensors if it can't."""
        changed = destination(func, args, kwargs)
        if runs_whole(func) or (changed is not None and self._ledger.entry(changed) is None):
            return self._whole(func, args, kwargs, tensors, changed)
        num_before = len(self._ledger.communications)
        try:
            output = func(*args, **kwargs)
        except NoRule:
            del self._ledger.communications[num_before:]
            return self._whole(func, args, kwargs, tensors, changed)
        for tensor in tensors_in(output):
            self._ledger.reduce(tensor, self._name)
        return output

    def _whole(
        self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor], changed: Tensor | None = None
    ) -> Any:
        """A call on gathered tensors."""
        if changed is not None and self._ledger.entry(changed) is not None:
            raise ChangedInPlace(self._name, self._ledger.sources([changed]))
        for tensor in tensors:
            self._ledger.gather(tensor, self._name)
        with self._ledger.closed():
            return without_data(func)(*args, **kwargs)

    def _locally(self, func: Function, args: Args, kwargs: Kwargs, dim: int | None, tensors: Sequence[Tensor]) -> Any:
        """A call that every rank makes on its own shards; its result is sharded on `dim`."""
        assert dim is not None
        sources = self._ledger.sources(tensors)
        with self._ledger.closed():
            output = func(*args, **kwargs)
        for tensor in tensors_in(output):
            self._ledger.put(tensor, Shard(dim), sources)
        return output

    def _call_on_channels(
        self, func: Function, args: Args, kwargs: Kwargs, call: ChannelCall, tensors: Sequence[Tensor]
    ) -> Any:
        if call.dim is None:
            return self._whole(func, args, kwargs, tensors)
        for vector in call.vectors:
            self._weights.shard_vector(vector, vector.numel())
            if self._ledger.dim(vector) != 0:
                self._ledger.gather(vector, self._name)
        if call.changes_statistics:
            self._statistics.update((id(buffer), buffer) for buffer in call.statistics)
        return self._locally(func, args, kwargs, call.dim, tensors)

    def complete_statistics(self) -> None:
        """What happens at the end of the block's forward."""
        self._ledger.complete(list(self._statistics.values()), "running statistics")

    def _attend(self, func: Function, args: Args, kwargs: Kwargs, call: Attention, tensors: Sequence[Tensor]) -> Any:
        ledger, operands = self._ledger, (call.query, call.key, call.value)
        dims = [ledger.dim(tensor) for tensor in operands]
        is_clear = all(d is not None or ledger.entry(t) is None for d, t in zip(dims, operands, strict=True))
        dim = attention_dim(call, *dims, size=ledger.size) if is_clear else None
        if dim is None:
            return self._whole(func, args, kwargs, tensors)
        if call.mask is not None and ledger.dim(call.mask) != mask_dim(call, dim):
            ledger.gather(call.mask, self._name)
        return self._locally(func, args, kwargs, dim, tensors)

    def op(self, op: OpOverload, args: Args, kwargs: Kwargs, run: Callable[[], Any]) -> Any:
        """Follow one aten op below a call."""
        ledger = self._ledger
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if op.namespace == "prim" or not any(ledger.entry(tensor) for tensor in tensors):
            return run()
        propagation = self._rules.propagate(op, args, kwargs, ledger.placement)
        for move in propagation.moves:
            ledger.move(move.tensor, move.source, move.target, ledger.sources([move.tensor]), self._name)
        sources = ledger.sources(tensors)
        output = run()
        for leaf, placement in zip(tree_leaves(output), propagation.outputs, strict=True):
            if isinstance(leaf, Tensor) and placement is not None:
                ledger.put(leaf, placement, sources)
        return output


class _FollowOps(TorchDispatchMode):
    """Hands every aten op to the follower."""

    def __init__(self, follower: _FollowCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._follower = follower

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        return self._follower.op(func, args, kwargs or {}, lambda: func(*args, **(kwargs or {})))
