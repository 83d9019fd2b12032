"""Deciding each weight of a block at its first use in a fake run.

    input of its first projection    the weight
    replicated                       column: its output features are sharded
    sharded on the contracted dim    row: its contracted features are sharded
    anything else                    replicated

A weight whose first use is no projection stays replicated; a bias goes with its weight.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.plan.block_plan import Role, WeightPlan
from lightning_3d.tensor.plan.ledger import Ledger
from lightning_3d.tensor.rules.aliases import AliasDims, alias_dims, only_first_is_sharded
from lightning_3d.tensor.rules.contraction import Contraction
from lightning_3d.tensor.rules.convolution import Convolution
from lightning_3d.tensor.rules.function import Function, tensors_in
from lightning_3d.tensor.rules.grouped import cut_pieces
from lightning_3d.tensor.rules.projection import Projection

_ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})


@dataclass(slots=True)
class _Weight:
    fqn: str
    """Its first name."""

    fake: Tensor

    role: Role | None = None
    """None until its first use."""

    shard_dim: int | None = None

    parts: Parts | None = None

    reason: str | None = None

    def replicate(self, reason: str) -> None:
        self.role, self.reason = "replicate", reason


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
        replicated: FQN -> reason, for weights that must not be sharded.
        by_hand: FQN -> column or row, for weights whose role is given.
        part_sizes: FQN -> sizes of the parts of its output features, for fused weights.
        ledger: Gets the placements of sharded weights.
    """

    def __init__(
        self,
        fakes: Mapping[str, Tensor],
        replicated: Mapping[str, str],
        by_hand: Mapping[str, Role],
        part_sizes: Mapping[str, tuple[int, ...]],
        ledger: Ledger,
    ) -> None:
        self.cuts: dict[str, set[int]] = {}
        """FQN -> where the block cuts the weight itself along its first dim."""
        self.stacked: set[str] = set()
        """FQNs of stacks of matrices that each see a part of the input."""
        self._fakes = fakes
        self._part_sizes = part_sizes
        self._by_hand = {id(fakes[fqn]): role for fqn, role in by_hand.items()}
        self._ledger = ledger
        self._weights: dict[int, _Weight] = {}
        self._aliases: dict[int, _Alias] = {}
        for fqn, fake in fakes.items():
            weight = self._weights.setdefault(id(fake), _Weight(fqn, fake))
            self._aliases[id(fake)] = _Alias(fake, weight, tuple(range(fake.dim())))
            if fqn in replicated:
                weight.replicate(replicated[fqn])

    def plans(self) -> tuple[WeightPlan, ...]:
        """The decisions, by name."""
        return tuple(self._plan(fqn, fake) for fqn, fake in self._fakes.items())

    def _plan(self, fqn: str, fake: Tensor) -> WeightPlan:
        weight = self._weights[id(fake)]
        return WeightPlan(
            fqn=fqn,
            shape=tuple(fake.shape),
            role=weight.role or "replicate",
            shard_dim=weight.shard_dim,
            parts=weight.parts,
            reason="not used in this forward" if weight.role is None else weight.reason,
        )

    def fqn_of(self, tensor: Tensor) -> str:
        """The first name of a weight, given itself, an alias or a part of it."""
        alias = self._aliases.get(id(tensor))
        return min(self._ledger.sources([tensor]), default="") if alias is None else alias.weight.fqn

    def make_aliases(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call that makes aliases of a weight that is, or may still be, sharded; else None."""
        source = self._aliases.get(id(args[0])) if args else None
        if source is None or not self.is_weight(source.tensor):
            return None
        made = alias_dims(function, args, kwargs)
        if made is None or not only_first_is_sharded(args, kwargs, self._is_sharded):
            return None
        weight, dims = source.weight, tuple(None if dim is None else source.dims[dim] for dim in made)
        if weight.shard_dim is not None and weight.shard_dim not in dims:
            return None
        with self._ledger.closed():
            output = function(*args, **kwargs)
        if None in dims:
            self.stacked.add(weight.fqn)
        for tensor in tensors_in(output):
            alias = self._aliases.setdefault(id(tensor), _Alias(tensor, weight, dims))  # `to` may return the weight
            if weight.shard_dim is not None:
                self._enter(alias, weight.shard_dim)
        return output

    def _is_sharded(self, tensor: Tensor) -> bool:
        return self._ledger.entry(tensor) is not None

    def have_features(self, fqns: Collection[str], length: int) -> bool:
        """Whether these sharded weights have so many output features, all of them."""
        named = [weight for weight in self._weights.values() if weight.fqn in fqns]
        return all(weight.fake.shape[weight.shard_dim or 0] == length for weight in named)

    def cut(self, function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call that cuts an undecided weight: column, if its parts are known."""
        weight = self._undecided(args[0]) if args and isinstance(args[0], Tensor) else None
        if weight is None or args[0] is not weight.fake:
            return
        if (pieces := cut_pieces(function, args, kwargs, 0)) is None:
            return
        self.cuts.setdefault(weight.fqn, set()).update(edge for piece in pieces for edge in piece)
        if weight.fqn in self._part_sizes:
            self._shard(weight, "column", 0)

    def decide(self, call: Projection | Convolution) -> bool:
        """Decide the weight of a projection if this is its first use; returns whether it is sharded."""
        weight = self._undecided(call.weight)
        if weight is not None and isinstance(call, Convolution) and call.groups > 1:
            self._choose_groups(weight, call)
        elif weight is not None:
            self._choose(weight, call)
        is_sharded = self._ledger.entry(call.weight) is not None
        if not is_sharded:
            self._replicate_bias(call, "its weight is replicated")
        return is_sharded

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or an alias of one, that is, or may still be, sharded."""
        alias = self._aliases.get(id(tensor))
        return alias is not None and (alias.weight.role is None or alias.weight.shard_dim is not None)

    def decide_contraction(self, call: Contraction) -> bool:
        """The same as `decide` for a contraction."""
        if (weight := self._undecided(call.weight)) is not None:
            self._choose_letter(weight, call)
        if call.is_stacked:
            self.stacked.add(self.fqn_of(call.weight))
        parts = self._ledger.parts(call.weight)
        dim = self._ledger.dim(call.weight) if parts is None else parts.dim
        return call.separates(dim, has_parts=parts is not None)

    def _choose_letter(self, weight: _Weight, call: Contraction) -> None:
        ledger, role = self._ledger, self._by_hand.get(id(weight.fake))
        entry, dim = ledger.entry(call.input), ledger.dim(call.input)
        is_along = dim is not None and call.of_input[dim] in call.contracted
        if role == "row" or (role is None and is_along):
            letters = [call.of_input[dim]] if dim is not None and is_along else call.contracted
            self._shard_letter(weight, "row", call, letters)
        elif role == "column" or entry is None or not entry.sources:
            self._shard_letter(weight, "column", call, call.features)
        else:
            weight.replicate(f"its input is {ledger.placement(call.input)}")

    def _shard_letter(self, weight: _Weight, role: Role, call: Contraction, letters: Sequence[str]) -> None:
        """Shard the first of these dims that divides."""
        dims = [call.of_weight.index(letter) for letter in letters]
        lengths = [call.weight.shape[dim] for dim in dims]
        for dim, length in zip(dims, lengths, strict=True):
            if length % self._ledger.size == 0:
                self._shard(weight, role, self._aliases[id(call.weight)].dims[dim])
                return
        weight.replicate(f"none of its {role} features {lengths} is divisible by {self._ledger.size}")

    def settle(self, name: str, tensors: Iterable[Tensor], output: object) -> None:
        """After a call that is no projection: weights that it made a tensor of, and that were undecided, replicate."""
        has_results = next(tensors_in(output), None) is not None
        for tensor in tensors if has_results else ():
            if (weight := self._undecided(tensor)) is not None:
                weight.replicate(f"used by {name}")

    def _undecided(self, tensor: Tensor) -> _Weight | None:
        alias = self._aliases.get(id(tensor))
        return None if alias is None or alias.weight.role is not None else alias.weight

    def _choose(self, weight: _Weight, call: Projection | Convolution) -> None:
        size = self._ledger.size
        dims, features_dim = self._aliases[id(call.weight)].dims, call.features_dim
        features, contracted = call.weight.shape[features_dim], call.weight.shape[1 - features_dim]
        role = self._by_hand.get(id(weight.fake))
        entry = self._ledger.entry(call.input)
        if role == "column" or (role is None and (entry is None or not entry.sources)):  # whole, or a slice of it
            if features % size:
                weight.replicate(f"{features} output features are not divisible by {size}")
                return
            self._shard(weight, "column", dims[features_dim])
            if call.bias is not None and weight.shard_dim is not None:
                self.shard_vector(call.bias, features, like=weight)
        elif role == "row" and contracted % size:
            weight.replicate(f"{contracted} input features are not divisible by {size}")
        elif role == "row" or self._ledger.dim(call.input) == call.input_dim:
            self._shard(weight, "row", dims[1 - features_dim])
            self._replicate_bias(call, "added after the all-reduce of a row weight")
        else:
            weight.replicate(f"its input is {self._ledger.placement(call.input)}")

    def _choose_groups(self, weight: _Weight, call: Convolution) -> None:
        """A convolution with groups: every rank has the groups of its own channels."""
        role, size = self._by_hand.get(id(weight.fake)), self._ledger.size
        if role == "row":
            weight.replicate("its groups can't be sharded on their input channels")
        elif role is None and not self._has_own_channels(call):
            weight.replicate("its input channels are not sharded")
        elif call.groups % size:
            weight.replicate(f"{call.groups} groups are not divisible by {size}")
        else:
            parts = self._ledger.parts(call.input)
            sizes = None if parts is None else parts.sizes
            self._shard(weight, "column", self._aliases[id(call.weight)].dims[0], sizes=sizes)
            if call.bias is not None and weight.shard_dim is not None:
                self.shard_vector(call.bias, call.bias.shape[0], like=weight, sizes=sizes)

    def _has_own_channels(self, call: Convolution) -> bool:
        parts = self._ledger.parts(call.input)
        if parts is None:
            return self._ledger.dim(call.input) == call.input_dim
        return parts.dim == call.input_dim and call.is_depthwise

    def shard_vector(
        self, tensor: Tensor, length: int, like: _Weight | None = None, sizes: tuple[int, ...] | None = None
    ) -> None:
        """Shard what goes with sharded features: a bias, or the weight of a norm over channels."""
        vector = self._undecided(tensor)
        if vector is not None and tensor.shape == (length,):
            self._shard(vector, "column", self._aliases[id(tensor)].dims[0], like, sizes)

    def join_features(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a call that adds an undecided weight, a bias, to features of column weights: it goes with them."""
        if name not in _ADDITIONS or kwargs or len(args) != 2 or not all(isinstance(arg, Tensor) for arg in args):
            return
        for bias, features in (args, (args[1], args[0])):
            weight, entry = self._undecided(bias), self._ledger.entry(features)
            if weight is None or entry is None or not entry.sources or not isinstance(entry.placement, Shard):
                continue
            length, dim = features.shape[entry.placement.dim], entry.placement.dim - features.dim() + bias.dim()
            fits = length % self._ledger.size == 0 if entry.parts is None else bias.dim() == features.dim()
            if fits and dim >= 0 and bias.shape[dim] == length:
                sizes = None if entry.parts is None else entry.parts.sizes
                self._shard(weight, "column", self._aliases[id(bias)].dims[dim], sizes=sizes)

    def _shard(
        self,
        weight: _Weight,
        role: Role,
        dim: int | None,
        like: _Weight | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        aliases = [alias for alias in self._aliases.values() if alias.weight is weight]
        if dim is None or any(dim not in alias.dims for alias in aliases):
            weight.replicate("its features are picked by index")
            return
        weight.role, weight.shard_dim = role, dim
        if sizes is None and role == "column":
            sizes = self._part_sizes.get((like or weight).fqn)
        if sizes is not None:
            weight.parts = Parts(dim=dim, sizes=sizes, num_ranks=self._ledger.size)
        for alias in aliases:
            self._enter(alias, dim)

    def _enter(self, alias: _Alias, shard_dim: int) -> None:
        dim, parts = alias.dims.index(shard_dim), alias.weight.parts
        if parts is None:
            self._ledger.put(alias.tensor, Shard(dim), frozenset())
        else:
            self._ledger.put_parts(alias.tensor, replace(parts, dim=dim), frozenset({alias.weight.fqn}))

    def _replicate_bias(self, call: Projection | Convolution, reason: str) -> None:
        if call.bias is not None and (bias := self._undecided(call.bias)) is not None:
            bias.replicate(reason)


def named_parameters(block: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, ties under every name."""
    return dict(block.named_parameters(remove_duplicate=False))
