"""Deciding each weight of a block at its first use in a fake run.

    input of its first projection    the weight
    replicated                       column: its output features are sharded
    sharded on the contracted dim    row: its contracted features are sharded
    anything else                    replicated

A weight whose first use is no projection stays replicated; a bias goes with its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import InterleavedShard, Placement, Shard, Sharded, in_parts
from lightning_3d.sharding.rules.aliases import AliasDims, alias_dims
from lightning_3d.sharding.rules.call import TorchCall
from lightning_3d.sharding.rules.contraction import Contraction
from lightning_3d.sharding.rules.convolution import Convolution
from lightning_3d.sharding.rules.function import tensors_in
from lightning_3d.sharding.rules.projection import Projection
from lightning_3d.sharding.rules.views import cut_pieces
from lightning_3d.sharding.sharded_tensor import (
    ShardedTensor,
    SourceWeights,
    cut_dim,
    parts_of,
    placement_of,
    shard_dim,
)
from lightning_3d.tensor.plan.block_plan import Role, WeightPlan

_ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


@dataclass(slots=True)
class _Weight:
    fqn: str
    """Its first name."""

    fake: Tensor

    role: Role | None = None
    """None until its first use."""

    sharding: Sharded | None = None
    """None as long as it is undecided, and for a replicated weight."""

    reason: str | None = None

    def replicate(self, reason: str) -> None:
        self.role, self.reason = "replicate", reason

    def plan(self, fqn: str) -> WeightPlan:
        shape, reason = tuple(self.fake.shape), "not used in this forward" if self.role is None else self.reason
        role = self.role or "replicate"
        return WeightPlan(fqn=fqn, shape=shape, role=role, sharding=self.sharding, reason=reason)


@dataclass(frozen=True, slots=True)
class _Alias:
    """A weight as the block's code has it: itself, or a tensor that was made of it."""

    tensor: Tensor
    """Kept, so that no id is used twice."""

    weight: _Weight

    dims: AliasDims
    """By dim of the alias: the weight's dim."""


class Weights:
    """The parameters of a block during a fake run.

    Args:
        fakes: Fake parameter by name; tied names have the same tensor.
        replicated: As for `Choice`.
        by_hand: As for `plan_block`.
        part_sizes: As for `Choice`.
        axis: The axis that the weights are sharded over.
        shard: Makes the sharded form of a weight or of an alias.
    """

    def __init__(
        self,
        fakes: Mapping[str, Tensor],
        replicated: Mapping[str, str],
        by_hand: Mapping[str, Role],
        part_sizes: Mapping[str, tuple[int, ...]],
        axis: Axis,
        shard: Callable[[Tensor, Sharded], ShardedTensor],
    ) -> None:
        self.cuts: dict[str, set[int]] = {}
        """FQN -> where the block cuts the weight itself along its first dim."""
        self.stacked: set[str] = set()
        """FQNs of stacks of matrices that each see a part of the input."""
        self._fakes = fakes
        self._part_sizes = part_sizes
        self._by_hand = {id(fakes[fqn]): role for fqn, role in by_hand.items()}
        self._axis, self._shard_alias = axis, shard
        self._weights: dict[int, _Weight] = {}
        self._sharded: dict[int, ShardedTensor] = {}
        self._aliases: dict[int, _Alias] = {}
        for fqn, fake in fakes.items():
            weight = self._weights.setdefault(id(fake), _Weight(fqn, fake))
            self._aliases[id(fake)] = _Alias(fake, weight, tuple(range(fake.dim())))
            if fqn in replicated:
                weight.replicate(replicated[fqn])

    def plans(self) -> tuple[WeightPlan, ...]:
        """The decisions, by name."""
        return tuple(self._weights[id(fake)].plan(fqn) for fqn, fake in self._fakes.items())

    def are_in(self, call: TorchCall) -> bool:
        """Whether a call has a weight, or an alias of one, among its arguments."""
        return not self._aliases.keys().isdisjoint(map(id, call.tensors))

    def fqn_of(self, tensor: Tensor) -> str:
        """The first name of a weight, given itself, an alias or a part of it."""
        if isinstance(tensor, ShardedTensor):
            return min(sources_of(tensor), default="")
        alias = self._aliases.get(id(tensor))
        return "" if alias is None else alias.weight.fqn

    def sharded(self, tensor: Tensor) -> Tensor:
        """This rank's part of a sharded weight, or of an alias of one; any other tensor as it is."""
        alias = self._aliases.get(id(tensor))
        sharding = None if alias is None else alias.weight.sharding
        if alias is None or sharding is None:
            return tensor
        if id(tensor) not in self._sharded:
            placement = sharding.at(alias.dims.index(sharding.dim))
            sharded = self._shard_alias(alias.tensor, placement)
            # A vector goes with the features of another weight, which are the origin of what is sharded.
            sharded.source_weights = SourceWeights(frozenset({alias.weight.fqn} if alias.weight.fake.dim() > 1 else ()))
            self._sharded[id(tensor)] = sharded
        return self._sharded[id(tensor)]

    def make_aliases(self, call: TorchCall, run: Callable[[TorchCall], Any]) -> Any:
        """The results of a call, from `run`, that makes aliases of a weight that may still be sharded; else None."""
        source = self._aliases.get(id(call.first))
        if source is None or source.weight.role is not None:
            return None
        made = alias_dims(call)
        if made is None or any(self._is_sharded(tensor) for tensor in call.tensors[1:]):
            return None
        weight, dims = source.weight, tuple(None if dim is None else source.dims[dim] for dim in made)
        output = run(call)
        if None in dims:
            self.stacked.add(weight.fqn)
        for tensor in tensors_in(output):
            self._aliases.setdefault(id(tensor), _Alias(tensor, weight, dims))  # `to` may return the weight
        return output

    def _is_sharded(self, tensor: Tensor) -> bool:
        return isinstance(self.sharded(tensor), ShardedTensor)

    def have_features(self, fqns: Collection[str], length: int) -> bool:
        """Whether these sharded weights have so many output features, all of them."""
        named = [weight for weight in self._weights.values() if weight.fqn in fqns]
        return all(weight.fake.shape[weight.sharding.dim if weight.sharding else 0] == length for weight in named)

    def cut(self, call: TorchCall) -> None:
        """Before a call that cuts an undecided weight: column, if its parts are known."""
        weight = self._undecided(call.first)
        if weight is None or call.first is not weight.fake:
            return
        if (pieces := cut_pieces(call, 0)) is None:
            return
        self.cuts.setdefault(weight.fqn, set()).update(edge for piece in pieces for edge in piece)
        if weight.fqn in self._part_sizes:
            self._shard(weight, "column", 0)

    def decide(self, call: Projection) -> None:
        """Decide the weight of a projection if this is its first use."""
        weight = self._undecided(call.weight)
        if weight is not None and isinstance(call, Convolution) and call.groups > 1:
            self._choose_groups(weight, call)
        elif weight is not None:
            self._choose(weight, call)
        if not self._is_sharded(call.weight):
            self._replicate_bias(call, "its weight is replicated")

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or an alias of one, that is, or may still be, sharded."""
        if isinstance(tensor, ShardedTensor):
            return tensor.is_weight
        alias = self._aliases.get(id(tensor))
        return alias is not None and (alias.weight.role is None or alias.weight.sharding is not None)

    def decide_contraction(self, call: Contraction) -> None:
        """Decide the weight of a contraction if this is its first use."""
        if (weight := self._undecided(call.weight)) is not None:
            self._choose_letter(weight, call)
        if call.is_stacked:
            self.stacked.add(self.fqn_of(call.weight))

    def _choose_letter(self, weight: _Weight, call: Contraction) -> None:
        role, dim = self._by_hand.get(id(weight.fake)), cut_dim(call.input)
        is_along = dim is not None and call.of_input[dim] in call.contracted
        if role == "row" or (role is None and is_along):
            letters = [call.of_input[dim]] if dim is not None and is_along else call.contracted
            self._shard_letter(weight, "row", call, letters)
        elif role == "column" or not sources_of(call.input):
            self._shard_letter(weight, "column", call, call.features)
        else:
            weight.replicate(f"its input is {placement_of(call.input)}")

    def _shard_letter(self, weight: _Weight, role: Role, call: Contraction, letters: Sequence[str]) -> None:
        """Shard the first of these dims that divides."""
        dims = [call.of_weight.index(letter) for letter in letters]
        lengths = [call.weight.shape[dim] for dim in dims]
        for dim, length in zip(dims, lengths, strict=True):
            if length % self._axis.size == 0:
                self._shard(weight, role, self._aliases[id(call.weight)].dims[dim])
                return
        weight.replicate(f"none of its {role} features {lengths} is divisible by {self._axis.size}")

    def finalize_uses(self, name: str, tensors: Iterable[Tensor], output: object) -> None:
        """Replicate each weight whose first use is this call, which no rule shards."""
        has_results = bool(tensors_in(output))
        for tensor in tensors if has_results else ():
            if (weight := self._undecided(tensor)) is not None:
                weight.replicate(f"used by {name}")

    def _undecided(self, tensor: object) -> _Weight | None:
        alias = self._aliases.get(id(tensor))
        return None if alias is None or alias.weight.role is not None else alias.weight

    def _choose(self, weight: _Weight, call: Projection) -> None:
        size = self._axis.size
        dims, features_dim = self._aliases[id(call.weight)].dims, call.features_dim
        features, contracted = call.weight.shape[features_dim], call.weight.shape[1 - features_dim]
        role = self._by_hand.get(id(weight.fake))
        if role == "column" or (role is None and not sources_of(call.input)):  # whole, or a slice of it
            if features % size:
                weight.replicate(f"{features} output features are not divisible by {size}")
                return
            self._shard(weight, "column", dims[features_dim])
            if call.bias is not None and weight.sharding is not None:
                self.shard_vector(call.bias, features, weight.sharding)
        elif contracted % size and (role == "row" or cut_dim(call.input) == call.input_dim):
            weight.replicate(f"{contracted} input features are not divisible by {size}")
        elif role == "row" or cut_dim(call.input) == call.input_dim:
            self._shard(weight, "row", dims[1 - features_dim])
            self._replicate_bias(call, "added after the all-reduce of a row weight")
        else:
            weight.replicate(f"its input is {placement_of(call.input)}")

    def _choose_groups(self, weight: _Weight, call: Convolution) -> None:
        """A convolution with groups: every rank has the groups of its own channels."""
        role, size = self._by_hand.get(id(weight.fake)), self._axis.size
        if role == "row":
            weight.replicate("its groups can't be sharded on their input channels")
        elif role is None and not self._has_own_channels(call):
            weight.replicate("its input channels are not sharded")
        elif call.groups % size:
            weight.replicate(f"{call.groups} groups are not divisible by {size}")
        else:
            self._shard(weight, "column", self._aliases[id(call.weight)].dims[0], placement_of(call.input))
            if call.bias is not None and weight.sharding is not None:
                self.shard_vector(call.bias, call.bias.shape[0], weight.sharding)

    def _has_own_channels(self, call: Convolution) -> bool:
        parts = parts_of(call.input)
        if parts is None:
            return shard_dim(call.input) == call.input_dim
        return parts.dim == call.input_dim and call.is_depthwise

    def shard_vector(self, tensor: Tensor, length: int, like: Sharded | None = None) -> None:
        """Shard what goes with sharded features, in the same parts: a bias, or the weight of a norm over channels."""
        vector = self._undecided(tensor)
        if vector is not None and tensor.shape == (length,):
            self._shard(vector, "column", self._aliases[id(tensor)].dims[0], like)

    def join_features(self, call: TorchCall) -> None:
        """Before a call that adds an undecided weight, a bias, to features of column weights: it goes with them."""
        if call.name not in _ADDITIONS or call.kwargs or not len(call.args) == len(call.tensors) == 2:
            return
        for bias, features in (call.args, call.args[::-1]):
            weight, at = self._undecided(bias), placement_of(features)
            if weight is None or at is None or not sources_of(features):
                continue
            length, dim = features.shape[at.dim], at.dim - features.dim() + bias.dim()
            fits = isinstance(at, Shard) or bias.dim() == features.dim()
            if fits and dim >= 0 and bias.shape[dim] == length:
                self._shard(weight, "column", self._aliases[id(bias)].dims[dim], at)

    def _shard(self, weight: _Weight, role: Role, dim: int | None, like: Placement | None = None) -> None:
        """Shard a weight on `dim`, in the parts of `like` if that has any, else in those that are known of it."""
        aliases = [alias for alias in self._aliases.values() if alias.weight is weight]
        if dim is None or any(dim not in alias.dims for alias in aliases):
            weight.replicate("its features are picked by index")
            return
        known = self._part_sizes.get(weight.fqn, ()) if role == "column" else ()
        sizes = like.sizes if isinstance(like, InterleavedShard) else known
        weight.role, weight.sharding = role, in_parts(dim, sizes, self._axis.size)

    def _replicate_bias(self, call: Projection, reason: str) -> None:
        if call.bias is not None and (bias := self._undecided(call.bias)) is not None:
            bias.replicate(reason)


def sources_of(tensor: Tensor) -> frozenset[str]:
    """FQNs of the column weights that a sharded tensor comes from; none for any other."""
    source_weights = tensor.source_weights if isinstance(tensor, ShardedTensor) else None
    return frozenset() if source_weights is None else source_weights.sources


def named_parameters(block: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, ties under every name."""
    return dict(block.named_parameters(remove_duplicate=False))
