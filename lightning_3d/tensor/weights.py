"""Deciding each weight of a block at its first use in a fake run.

    input of its first projection    the weight
    replicated                       column: its output features are sharded
    sharded on the contracted dim    row: its contracted features are sharded
    anything else                    replicated

A weight whose first use is no projection stays replicated; a bias goes with its weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from lightning_3d.tensor.calls import Function, Projection, tensors_in
from lightning_3d.tensor.contraction import Contraction
from lightning_3d.tensor.grouped import cut_pieces
from lightning_3d.tensor.ledger import Ledger
from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.plan import Role, WeightPlan

_TRANSPOSES = frozenset({Tensor.t, Tensor.T.__get__, Tensor.mT.__get__})  # type: ignore[attr-defined]  # descriptors


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

    transposed: Tensor | None = None
    """Its transpose, once the block has taken one."""

    def holds(self, tensor: Tensor) -> bool:
        return tensor is self.fake or tensor is self.transposed

    def replicate(self, reason: str) -> None:
        self.role, self.reason = "replicate", reason


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
        self._fakes = fakes
        self._part_sizes = part_sizes
        self._by_hand = {id(fakes[fqn]): role for fqn, role in by_hand.items()}
        self._ledger = ledger
        self._weights: dict[int, _Weight] = {}
        for fqn, fake in fakes.items():
            weight = self._weights.setdefault(id(fake), _Weight(fqn, fake))
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
        """The first name of a weight, given itself, its transpose or a part of it."""
        named = (weight.fqn for weight in self._weights.values() if weight.holds(tensor))
        return next(named, None) or min(self._ledger.sources([tensor]), default="")

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

    def decide(self, call: Projection) -> bool:
        """Decide the weight of a projection if this is its first use; returns whether it is sharded."""
        weight = self._undecided(call.weight)
        if weight is not None:
            self._choose(weight, call)
        is_sharded = self._ledger.entry(call.weight) is not None
        if not is_sharded:
            self._replicate_bias(call, "its weight is replicated")
        return is_sharded

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter that is, or may still be, sharded."""
        known = (w for w in self._weights.values() if tensor is w.fake)
        return any(weight.role is None or weight.shard_dim is not None for weight in known)

    def decide_contraction(self, call: Contraction) -> bool:
        """The same as `decide` for a contraction."""
        if (weight := self._undecided(call.weight)) is not None:
            self._choose_letter(weight, call)
        return call.separates(self._ledger.dim(call.weight))

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
        lengths = [weight.fake.shape[call.of_weight.index(letter)] for letter in letters]
        for letter, length in zip(letters, lengths, strict=True):
            if length % self._ledger.size == 0:
                self._shard(weight, role, call.of_weight.index(letter))
                return
        weight.replicate(f"none of its {role} features {lengths} is divisible by {self._ledger.size}")

    def settle(self, function: Function, name: str, tensors: Iterable[Tensor], output: object) -> None:
        """After a call that is no projection: weights that it made a tensor of, and that were undecided, replicate."""
        results: Sequence[Tensor] = list(tensors_in(output))
        for tensor in tensors if results else ():
            if (weight := self._undecided(tensor)) is None:
                continue
            if function in _TRANSPOSES and weight.transposed is None and tensor is weight.fake:
                weight.transposed = results[0]
            else:
                weight.replicate(f"used by {name}")

    def _undecided(self, tensor: Tensor) -> _Weight | None:
        return next((w for w in self._weights.values() if w.role is None and w.holds(tensor)), None)

    def _choose(self, weight: _Weight, call: Projection) -> None:
        size = self._ledger.size
        features_dim = call.features_dim if call.weight is weight.fake else 1 - call.features_dim
        features, contracted = weight.fake.shape[features_dim], weight.fake.shape[1 - features_dim]
        role = self._by_hand.get(id(weight.fake))
        entry = self._ledger.entry(call.input)
        if role == "column" or (role is None and (entry is None or not entry.sources)):  # whole, or a slice of it
            if features % size:
                weight.replicate(f"{features} output features are not divisible by {size}")
                return
            self._shard(weight, "column", features_dim)
            bias = None if call.bias is None else self._undecided(call.bias)
            if bias is not None and bias.fake.shape == (features,):
                self._shard(bias, "column", 0, like=weight)
        elif role == "row" and contracted % size:
            weight.replicate(f"{contracted} input features are not divisible by {size}")
        elif role == "row" or self._ledger.dim(call.input) == call.input.dim() - 1:
            self._shard(weight, "row", 1 - features_dim)
            self._replicate_bias(call, "added after the all-reduce of a row weight")
        else:
            weight.replicate(f"its input is {self._ledger.placement(call.input)}")

    def _shard(self, weight: _Weight, role: Role, dim: int, like: _Weight | None = None) -> None:
        weight.role, weight.shard_dim = role, dim
        sizes = self._part_sizes.get((like or weight).fqn) if role == "column" and weight.transposed is None else None
        if sizes is None:
            self._ledger.put(weight.fake, Shard(dim), frozenset())
        else:
            weight.parts = Parts(dim=dim, sizes=sizes, num_ranks=self._ledger.size)
            self._ledger.put_parts(weight.fake, weight.parts, frozenset({weight.fqn}))
        if weight.transposed is not None:
            self._ledger.put(weight.transposed, Shard(1 - dim), frozenset())

    def _replicate_bias(self, call: Projection, reason: str) -> None:
        if call.bias is not None and (bias := self._undecided(call.bias)) is not None:
            bias.replicate(reason)


def named_parameters(block: nn.Module) -> dict[str, nn.Parameter]:
    """All parameters, ties under every name."""
    return dict(block.named_parameters(remove_duplicate=False))
