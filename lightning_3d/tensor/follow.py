"""Following placements through one run of a block on fake tensors, and deciding every weight at its first use.

[Note: replicated is plain]
Inside a block a replicated tensor is a plain tensor and only a sharded one is a DTensor. Calls on plain tensors alone
are the user's own, untouched. Sharding begins where a plain activation meets a column weight, lives through the calls
that DTensor can run on shards, and ends at a row weight (an all-reduce) or, at a price, at a call that has no sharded
form (an all-gather). What is only partially reduced is reduced at once.

         plain          sharded                                  plain
    x ---------> column ---------> view, attention, gelu, ... ---------> row, all-reduce --> y

Here the same is done on fake tensors with full shapes and a table of placements beside them; `sharded_calls` does it
with DTensors. Both read the calls through `calls`, and DTensor's own rules (`rules`) say what DTensor will do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.errors import PlanError
from lightning_3d.tensor.calls import (
    Attention,
    Dropout,
    Function,
    Projection,
    as_attention,
    as_dropout,
    as_projection,
    attention_dim,
    batched_matmul_dim,
    destination,
    function_name,
    is_batched_matmul,
    is_random,
    mask_dim,
    tensors_in,
)
from lightning_3d.tensor.plan import Role, WeightPlan
from lightning_3d.tensor.preserve import preserved
from lightning_3d.tensor.rules import NoRule, ShardingRules

Kind = Literal["all-reduce", "all-gather", "all-to-all", "reduce-scatter"]

_TRANSPOSES = frozenset({Tensor.t, torch.t, Tensor.T.__get__, Tensor.mT.__get__})  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True, slots=True)
class Communication:
    """One collective of the forward."""

    kind: Kind

    num_bytes: int
    """Bytes that each rank sends (ring algorithms)."""

    call: str
    """Name of the call that needs it."""

    sources: frozenset[str]
    """FQNs of the column weights that the tensor's sharding comes from."""

    row: str | None = None
    """FQN of the row weight whose output is reduced; None for any other communication."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Followed:
    """What one run of a block showed."""

    weights: tuple[WeightPlan, ...]
    """By parameter name, ties under every name."""

    communications: tuple[Communication, ...]
    """In the order of the forward."""

    num_column_inputs: int
    """Distinct replicated activations that enter column weights: each is one all-reduce in the backward."""

    output_bytes: Mapping[str, int]
    """FQN of a column or row weight -> bytes of the full outputs of its uses."""

    @property
    def communicated_bytes(self) -> int:
        """Bytes that each rank sends in one forward."""
        return sum(communication.num_bytes for communication in self.communications)


@dataclass(frozen=True, slots=True)
class _Sharding:
    placement: Placement
    sources: frozenset[str]


@dataclass(slots=True)
class _Weight:
    """A parameter while its block is followed; `role` is None until its first use decides it."""

    fqn: str
    shape: tuple[int, ...]
    fake: Tensor
    role: Role | None = None
    shard_dim: int | None = None
    reason: str | None = None
    transposed: Tensor | None = None
    """Its transpose, once the block has taken one."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is this weight or its transpose."""
        return tensor is self.fake or tensor is self.transposed


def follow_block(
    block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, size: int, replicated: Mapping[str, str]
) -> Followed:
    """Run a block's forward on fake tensors and see where its weights can be sharded and what that communicates.

    Args:
        block: On any device, meta included; it is left as it was.
        args: Positional arguments of its forward; only the metadata of tensors counts.
        kwargs: Keyword arguments of its forward.
        size: Length of the tp axis.
        replicated: FQN -> reason, for weights that must not be sharded.

    Raises:
        PlanError: a call changes a sharded tensor in place and has no sharded form.
        Exception: whatever the block raises on fake tensors.
    """
    names = list(block.named_parameters(remove_duplicate=False))
    rules = ShardingRules(size)
    with preserved(block), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        device = _device([*tree_leaves((args, dict(kwargs))), *(parameter for _, parameter in names)])
        weights: dict[int, _Weight] = {}
        for fqn, parameter in names:
            if id(parameter) not in weights:
                fake = _fake(parameter, device).requires_grad_(parameter.requires_grad)
                weights[id(parameter)] = _Weight(fqn, tuple(parameter.shape), fake)
        for fqn, parameter in names:
            if fqn in replicated:
                weights[id(parameter)].role, weights[id(parameter)].reason = "replicate", replicated[fqn]
        for module in block.modules():
            for name, member in module._parameters.items():
                if member is not None:
                    module._parameters[name] = weights[id(member)].fake  # type: ignore[assignment]  # a stand-in
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = _fake(buffer, device)
        fake_args, fake_kwargs = tree_map(
            lambda leaf: _fake(leaf, device) if isinstance(leaf, Tensor) else leaf, (tuple(args), dict(kwargs))
        )
        follower = _FollowCalls(list(weights.values()), rules, size)
        with follower.watching():
            output = block.forward(*fake_args, **fake_kwargs)
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                follower.gather(leaf, "the block's output")
    return Followed(
        weights=tuple(_decision(fqn, weights[id(parameter)]) for fqn, parameter in names),
        communications=tuple(follower.communications),
        num_column_inputs=len(follower.column_inputs),
        output_bytes=follower.output_bytes,
    )


def _device(leaves: Sequence[object]) -> torch.device:
    """One device for all fakes: the one that the arguments, else the parameters, really are on."""
    devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta")
    return next(devices, torch.device("cpu"))


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _decision(fqn: str, weight: _Weight) -> WeightPlan:
    return WeightPlan(
        fqn=fqn,
        shape=weight.shape,
        role=weight.role or "replicate",
        shard_dim=weight.shard_dim,
        reason="not used in this forward" if weight.role is None else weight.reason,
    )


class _FollowCalls(TorchFunctionMode):
    """Sees the calls that the block makes, and through `_FollowOps` the aten ops that they consist of."""

    def __init__(self, weights: Sequence[_Weight], rules: ShardingRules, size: int) -> None:
        super().__init__()
        self.communications: list[Communication] = []
        self.column_inputs: dict[tuple[int, int], Tensor] = {}
        self.output_bytes: dict[str, int] = {}
        self._size = size
        self._rules = rules
        self._weights = {id(weight.fake): weight for weight in weights}
        # Keyed by id: every tensor of the run is kept alive in `_kept`, so that no id is used twice.
        self._table: dict[int, _Sharding] = {}
        self._kept: list[Tensor] = []
        self._call = ""
        self._blind = False

    @contextmanager
    def watching(self) -> Iterator[Self]:
        """Follow every call made inside."""
        with _FollowOps(self), self:
            yield self

    # ------------------------------------------------------------------------------------------ the table of placements

    def sharding(self, tensor: Tensor) -> _Sharding | None:
        """The entry of a sharded tensor; None if it is replicated."""
        return None if self._blind else self._table.get(id(tensor))

    def _dim(self, tensor: Tensor) -> int | None:
        """The dim that a tensor is evenly sharded on."""
        sharding = self.sharding(tensor)
        if sharding is None or not isinstance(sharding.placement, Shard):
            return None
        dim = sharding.placement.dim
        return dim if tensor.shape[dim] % self._size == 0 else None

    def _put(self, tensor: Tensor, placement: Placement, sources: frozenset[str]) -> None:
        self._kept.append(tensor)
        if isinstance(placement, Replicate):
            self._table.pop(id(tensor), None)
        else:
            self._table[id(tensor)] = _Sharding(placement, sources)

    def _sources(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        entries = [self.sharding(tensor) for tensor in tensors]
        return frozenset[str]().union(*(entry.sources for entry in entries if entry is not None))

    @contextmanager
    def _unwatched(self) -> Iterator[None]:
        """Let ops run on full tensors: nothing is sharded, and no result becomes so."""
        outer, self._blind = self._blind, True
        try:
            yield
        finally:
            self._blind = outer

    # -------------------------------------------------------------------------------------------------- communication

    def gather(self, tensor: Tensor, call: str) -> None:
        """Count what makes a tensor whole."""
        if (sharding := self.sharding(tensor)) is not None:
            self._communicate(tensor, sharding.placement, Replicate(), sharding.sources, call)

    def _communicate(
        self,
        tensor: Tensor,
        source: Placement,
        target: Placement,
        sources: frozenset[str],
        call: str,
        row: str | None = None,
    ) -> None:
        num_bytes, size = tensor.numel() * tensor.element_size(), self._size
        kind: Kind
        if source.is_replicate() or source == target:
            return
        if target.is_partial():
            return
        if source.is_partial():
            kind = "all-reduce" if target.is_replicate() else "reduce-scatter"
            sent = num_bytes * (size - 1) // size * (2 if target.is_replicate() else 1)
        elif target.is_replicate():
            kind, sent = "all-gather", num_bytes * (size - 1) // size
        else:
            kind, sent = "all-to-all", num_bytes * (size - 1) // size**2
        self.communications.append(Communication(kind=kind, num_bytes=sent, call=call, sources=sources, row=row))

    # ---------------------------------------------------------------------------------------------------------- calls

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self._call = function_name(func)
        projection = as_projection(func, args, kwargs)
        if projection is not None and self._decide(projection):
            return self._project(func, args, kwargs, projection)
        tensors = list(tensors_in((args, kwargs)))
        if not any(self.sharding(tensor) for tensor in tensors):
            output = func(*args, **kwargs)
            self._settle(func, tensors, output)
            return output
        if (attention := as_attention(func, args, kwargs)) is not None:
            return self._attend(func, args, kwargs, attention)
        if (dropout := as_dropout(func, args, kwargs)) is not None:
            return self._drop(func, args, kwargs, dropout)
        if is_batched_matmul(func, args, kwargs):
            dim = batched_matmul_dim(args[0], args[1], self._dim(args[0]), self._dim(args[1]))
            if dim is not None:
                return self._locally(func, args, kwargs, dim, tensors)
        return self._generic(func, args, kwargs, tensors)

    def _generic(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
        changed = destination(func, args, kwargs)
        if is_random(func) or (changed is not None and self.sharding(changed) is None):
            return self._whole(func, args, kwargs, tensors, changed)
        num_before = len(self.communications)
        try:
            output = func(*args, **kwargs)
        except NoRule:
            del self.communications[num_before:]
            return self._whole(func, args, kwargs, tensors, changed)
        self._settle(func, tensors, output)
        for tensor in tensors_in(output):
            sharding = self.sharding(tensor)
            if sharding is not None and sharding.placement.is_partial():
                self.gather(tensor, self._call)
                self._put(tensor, Replicate(), frozenset())
        return output

    def _whole(
        self,
        func: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        changed: Tensor | None = None,
    ) -> Any:
        """Gather everything for a call that has no sharded form."""
        if changed is not None and self.sharding(changed) is not None:
            raise PlanError(f"{self._call} changes a sharded tensor in place and has no sharded form")
        for tensor in {id(tensor): tensor for tensor in tensors}.values():
            self.gather(tensor, self._call)
        with self._unwatched():
            output = func(*args, **kwargs)
        self._settle(func, tensors, output)
        return output

    def _locally(
        self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, tensors: Sequence[Tensor]
    ) -> Any:
        """A call that every rank makes on its own shards; its result is sharded on `dim`."""
        sources = self._sources(tensors)
        with self._unwatched():
            output = func(*args, **kwargs)
        self._put(output, Shard(dim), sources)
        return output

    def _attend(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], call: Attention) -> Any:
        dims = [self._dim(tensor) for tensor in (call.query, call.key, call.value)]
        strided = any(
            dim is None and self.sharding(tensor) is not None
            for dim, tensor in zip(dims, (call.query, call.key, call.value), strict=True)
        )
        dim = None if strided else attention_dim(call, *dims, size=self._size)
        tensors = list(tensors_in((args, kwargs)))
        if dim is None:
            return self._whole(func, args, kwargs, tensors)
        if call.mask is not None and self._dim(call.mask) != mask_dim(call, dim):
            self.gather(call.mask, self._call)
        return self._locally(func, args, kwargs, dim, tensors)

    def _drop(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], call: Dropout) -> Any:
        sharding = self.sharding(call.input)
        assert sharding is not None
        with self._unwatched():
            output = func(*args, **kwargs)
        self._put(output, sharding.placement, sharding.sources)
        return output

    # -------------------------------------------------------------------------------------------------------- weights

    def _undecided(self, tensor: Tensor) -> _Weight | None:
        for weight in self._weights.values():
            if weight.role is None and weight.holds(tensor):
                return weight
        return None

    def _settle(self, func: Function, tensors: Sequence[Tensor], output: object) -> None:
        """A weight that is first used by any other call than a projection stays replicated."""
        results = list(tensors_in(output))
        if not results:
            return
        for tensor in tensors:
            if (weight := self._undecided(tensor)) is None:
                continue
            if func in _TRANSPOSES and weight.transposed is None and tensor is weight.fake:
                weight.transposed = results[0]
            else:
                self._replicate(weight, f"used by {self._call}")

    @staticmethod
    def _replicate(weight: _Weight, reason: str) -> None:
        weight.role, weight.reason = "replicate", reason

    def _decide(self, call: Projection) -> bool:
        """Decide the weight if this is its first use; returns whether it is sharded."""
        weight = self._undecided(call.weight)
        if weight is not None:
            features_dim = call.features_dim
            if call.weight is weight.transposed:
                features_dim = 1 - features_dim
            self._choose(weight, call, features_dim)
            if weight.shard_dim is not None:
                dims = {id(weight.fake): weight.shard_dim}
                if weight.transposed is not None:
                    dims[id(weight.transposed)] = 1 - weight.shard_dim
                    self._put(weight.transposed, Shard(dims[id(weight.transposed)]), frozenset())
                self._put(weight.fake, Shard(weight.shard_dim), frozenset())
        is_sharded = self._dim(call.weight) is not None
        if not is_sharded and call.bias is not None and (bias := self._undecided(call.bias)) is not None:
            self._replicate(bias, "its weight is replicated")
        return is_sharded

    def _choose(self, weight: _Weight, call: Projection, features_dim: int) -> None:
        sharding = self.sharding(call.input)
        bias = None if call.bias is None else self._undecided(call.bias)
        if sharding is None:
            features = weight.shape[features_dim]
            if features % self._size:
                return self._replicate(weight, f"{features} output features are not divisible by {self._size}")
            weight.role, weight.shard_dim = "column", features_dim
            if bias is not None and bias.shape == (features,):
                bias.role, bias.shard_dim = "column", 0
                self._put(bias.fake, Shard(0), frozenset())
        elif self._dim(call.input) == call.input.dim() - 1:
            weight.role, weight.shard_dim = "row", 1 - features_dim
            if bias is not None:
                self._replicate(bias, "added after the all-reduce of a row weight")
        else:
            self._replicate(weight, f"its input is {sharding.placement}")
        return None

    def _project(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], call: Projection) -> Any:
        """``input @ weight + bias`` with a sharded weight."""
        fqn = next((weight.fqn for weight in self._weights.values() if weight.holds(call.weight)), "")
        with self._unwatched():
            output = func(*args, **kwargs)
        self._settle(func, [] if call.bias is None else [call.bias], output)
        self.output_bytes[fqn] = self.output_bytes.get(fqn, 0) + output.numel() * output.element_size()
        if self._dim(call.weight) == call.features_dim:
            self.gather(call.input, self._call)
            self.column_inputs.setdefault((id(call.input), call.input._version), call.input)
            self._kept.append(call.input)
            self._put(output, Shard(output.dim() - 1), frozenset({fqn}))
        else:
            if self._dim(call.input) != call.input.dim() - 1:
                self.gather(call.input, self._call)
            sources = self._sources([call.input])
            self._communicate(output, Partial(), Replicate(), sources, self._call, row=fqn)
        return output

    # ------------------------------------------------------------------------------------------------------------ ops

    def op(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[[], Any]) -> Any:
        """Follow one aten op below a call."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if op.namespace == "prim" or not any(self.sharding(tensor) for tensor in tensors):
            return run()
        propagation = self._rules.propagate(op, args, kwargs, self._placement)
        for move in propagation.moves:
            self._communicate(move.tensor, move.source, move.target, self._sources([move.tensor]), self._call)
        sources = self._sources(tensors)
        output = run()
        for leaf, placement in zip(tree_leaves(output), propagation.outputs, strict=True):
            if isinstance(leaf, Tensor) and placement is not None:
                self._put(leaf, placement, sources)
        return output

    def _placement(self, tensor: Tensor) -> Placement:
        sharding = self.sharding(tensor)
        return Replicate() if sharding is None else sharding.placement


class _FollowOps(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch 2.13
    """Hands every aten op to the follower."""

    def __init__(self, follower: _FollowCalls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._follower = follower

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._follower.op(func, args, kwargs or {}, lambda: func(*args, **(kwargs or {})))
