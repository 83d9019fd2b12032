"""The tensor-parallel plan of one block: a frozen, printable decision, made without any communication.

The plan says for every parameter of a block whether it is sharded over the tp axis and along which dim, and what the
block then communicates. How it is found is in `search`; applying it is in `apply`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor import Shard as DTensorShard

from lightning_3d.sharding.axis import Kind, sent_bytes
from lightning_3d.sharding.placement import InterleavedShard, Sharded

Role = Literal["column", "row", "replicate", "vocabulary"]
"""column: the output features are sharded; row: the contracted features are; replicate: every rank holds all of it;
vocabulary: the rows of an embedding table or of an output head are sharded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightPlan:
    """The decision for one parameter."""

    fqn: str
    """Name relative to the block; a tied parameter has one entry per name."""

    shape: tuple[int, ...]
    """The full shape."""

    role: Role

    sharding: Sharded | None = None
    """The dim that is cut into shards, equal ones but for ``vocabulary``, in parts or not; None for ``replicate``."""

    reason: str | None = None
    """Why the parameter stays replicated; None for a sharded one."""

    @property
    def num_elements(self) -> int:
        """The number of elements of the full parameter."""
        return math.prod(self.shape)

    @property
    def shard_dim(self) -> int | None:
        """The dim that is cut into shards; None for a replicated parameter."""
        return None if self.sharding is None else self.sharding.dim

    @property
    def parts(self) -> InterleavedShard | None:
        """The parts of that dim, where each rank holds a slice of every part; None if that is one slice."""
        return self.sharding if isinstance(self.sharding, InterleavedShard) else None

    @property
    def placement(self) -> Placement:
        """The DTensor placement on the tp axis."""
        return Replicate() if self.shard_dim is None else DTensorShard(self.shard_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective over the tp axis."""

    kind: Kind

    num_bytes: int
    """Bytes that each rank sends (ring algorithms)."""

    call: str
    """Name of the call that needs it."""

    is_backward: bool = False

    @classmethod
    def of_full(cls, kind: Kind, num_bytes: int, call: str, *, size: int, is_backward: bool = False) -> Collective:
        """One of a full tensor of `num_bytes`, over `size` ranks."""
        return cls(kind=kind, num_bytes=sent_bytes(kind, num_bytes, size), call=call, is_backward=is_backward)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockTensorPlan:
    """How one block runs on ``size`` tensor-parallel ranks."""

    size: int
    """The length of the tp axis."""

    weights: tuple[WeightPlan, ...]
    """One entry per parameter name, in the order of ``named_parameters``."""

    collectives: tuple[Collective, ...] = ()
    """All that one forward and backward with the example's shapes communicate; not what checkpoints compute again."""

    is_sequence_parallel: bool = False
    """Whether what lies between the sharded weights works on slices of the sequence (`sequence`)."""

    not_sequence_parallel: str | None = None
    """Why it is not, though the configuration asks for it and the block can be sharded otherwise."""

    data_dependent_routing: bool = False
    """Whether data decides which weights a row meets, or which calls are made. What is decided is then broadcast from
    the first rank, beside ``collectives``: scores of experts, for instance, which are small."""

    unused_outputs: frozenset[int] = frozenset()
    """Leaves of the block's output, by position, that nothing reads and that stay on shards."""

    gathers_logits: bool = False
    """Whether logits on shards are gathered at once, beside what the loss computes on shards."""

    reason: str | None = None
    """Why the whole block is replicated; None if anything is sharded."""

    @property
    def num_all_reduces_forward(self) -> int:
        """All-reduces of sums, for instance of the outputs of row weights."""
        return self._count(are_all_reduces=True, are_backward=False)

    @property
    def num_all_reduces_backward(self) -> int:
        """All-reduces of gradients of replicated tensors, for instance of the inputs of column weights."""
        return self._count(are_all_reduces=True, are_backward=True)

    @property
    def num_other_collectives_forward(self) -> int:
        """All-gathers, reduce-scatters and all-to-alls."""
        return self._count(are_all_reduces=False, are_backward=False)

    @property
    def num_other_collectives_backward(self) -> int:
        """All-gathers, reduce-scatters and all-to-alls."""
        return self._count(are_all_reduces=False, are_backward=True)

    @property
    def communicated_bytes(self) -> int:
        """Bytes that each rank sends in one forward and backward."""
        return sum(collective.num_bytes for collective in self.collectives)

    def _count(self, *, are_all_reduces: bool, are_backward: bool) -> int:
        wanted = are_all_reduces, are_backward
        return sum((c.kind == "all-reduce", c.is_backward) == wanted for c in self.collectives)

    @property
    def is_sharded(self) -> bool:
        """Whether any parameter is sharded."""
        return any(weight.shard_dim is not None for weight in self.weights)

    @property
    def has_vocabulary(self) -> bool:
        """Whether any parameter is sharded over the vocabulary."""
        return any(weight.role == "vocabulary" for weight in self.weights)

    @property
    def sharded_share(self) -> float:
        """The part of the block's parameter elements, 0 to 1, that is sharded; ties count once per name."""
        total = sum(weight.num_elements for weight in self.weights)
        sharded = sum(weight.num_elements for weight in self.weights if weight.shard_dim is not None)
        return sharded / total if total else 0.0

    def weight(self, fqn: str) -> WeightPlan:
        """The decision for one parameter.

        Raises:
            KeyError: the block has no parameter of that name.
        """
        for weight in self.weights:
            if weight.fqn == fqn:
                return weight
        raise KeyError(fqn)

    @property
    def summary(self) -> str:
        """The plan in one line."""
        if self.reason is not None:
            return f"tensor parallel {self.size}: replicated, {self.reason}"
        return (
            f"tensor parallel {self.size}: {self.sharded_share:.1%} of the parameters sharded, "
            f"{self.num_all_reduces_forward} all-reduces forward, {self.num_all_reduces_backward} backward, "
            f"{self.num_other_collectives_forward} + {self.num_other_collectives_backward} other collectives, "
            f"{self.communicated_bytes} bytes"
        )


def replicated_plan(block: nn.Module, *, size: int, reason: str) -> BlockTensorPlan:
    """The plan that leaves a block alone: every rank holds and computes all of it."""
    weights = tuple(
        WeightPlan(fqn=fqn, shape=tuple(parameter.shape), role="replicate", reason=reason)
        for fqn, parameter in block.named_parameters(remove_duplicate=False)
    )
    return BlockTensorPlan(size=size, weights=weights, reason=reason)
