"""Following placements through one run of a block on fake tensors.

[Note: replicated is plain]
Inside a block a replicated tensor is a plain tensor and only a sharded one is a DTensor. Calls on plain tensors alone
are the user's own, untouched. Sharding begins where a plain activation meets a column weight, lives through the calls
that DTensor can run on shards, and ends at a row weight (an all-reduce) or, at a price, at a call that has no sharded
form (an all-gather). What is only partially reduced is reduced at once.

         plain          sharded                                  plain
    x ---------> column ---------> view, attention, gelu, ... ---------> row, all-reduce --> y

Here the same is done on fake tensors with full shapes and a table of placements beside them (`ledger`);
`sharded_calls` does it with DTensors. Both read the calls through `calls`, and DTensor's own rules (`rules`) say what
DTensor will do. Weights are decided on the way (`weights`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_3d.errors import PlanError
from lightning_3d.tensor.calls import (
    Attention,
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
from lightning_3d.tensor.ledger import Communication, Ledger
from lightning_3d.tensor.plan import Role, WeightPlan
from lightning_3d.tensor.preserve import preserved
from lightning_3d.tensor.rules import NoRule, ShardingRules
from lightning_3d.tensor.weights import Weights, named_parameters

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


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


def follow_block(
    block: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    size: int,
    replicated: Mapping[str, str],
    by_hand: Mapping[str, Role] = MappingProxyType({}),
) -> Followed:
    """Run a block's forward on fake tensors and see where its weights can be sharded and what that communicates.

    Args:
        block: On any device, meta included; it is left as it was.
        args: Positional arguments of its forward; only the metadata of tensors counts.
        kwargs: Keyword arguments of its forward.
        size: Length of the tp axis.
        replicated: FQN -> reason, for weights that must not be sharded.
        by_hand: FQN -> column or row, for weights whose role is given.

    Raises:
        PlanError: a call changes a sharded tensor in place and has no sharded form.
        Exception: whatever the block raises on fake tensors.
    """
    parameters = named_parameters(block)
    rules, ledger = ShardingRules(size), Ledger(size)
    with preserved(block), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        device = _device([*tree_leaves((args, dict(kwargs))), *parameters.values()])
        fakes = {id(parameter): _fake(parameter, device) for parameter in parameters.values()}
        _stand_in(block, fakes, device)
        weights = Weights({fqn: fakes[id(p)] for fqn, p in parameters.items()}, replicated, by_hand, ledger)
        fake_args, fake_kwargs = tree_map(
            lambda leaf: _fake(leaf, device) if isinstance(leaf, Tensor) else leaf, (tuple(args), dict(kwargs))
        )
        follower = _FollowCalls(weights, rules, ledger)
        with _FollowOps(follower), follower:
            output = block.forward(*fake_args, **fake_kwargs)
        for tensor in {id(leaf): leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)}.values():
            ledger.gather(tensor, "the block's output")
    return Followed(
        weights=weights.plans(),
        communications=tuple(ledger.communications),
        num_column_inputs=len(follower.column_inputs),
        output_bytes=follower.output_bytes,
    )


def _device(leaves: Sequence[object]) -> torch.device:
    """One device for all fakes: the one that the arguments, else the parameters, really are on."""
    devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta")
    return next(devices, torch.device("cpu"))


def _fake(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)


def _stand_in(block: nn.Module, fakes: Mapping[int, Tensor], device: torch.device) -> None:
    """Hang fake parameters and buffers where the block's code finds the real ones."""
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fakes[id(parameter)]  # type: ignore[assignment]  # not a Parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = _fake(buffer, device)


class _FollowCalls(TorchFunctionMode):
    """Sees the calls that the block makes, and through `_FollowOps` the aten ops that they consist of."""

    def __init__(self, weights: Weights, rules: ShardingRules, ledger: Ledger) -> None:
        super().__init__()
        self.column_inputs: dict[tuple[int, int], Tensor] = {}
        self.output_bytes: dict[str, int] = {}
        self._weights = weights
        self._rules = rules
        self._ledger = ledger
        self._name = ""

    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        self._name = function_name(func)
        projection = as_projection(func, args, kwargs)
        if projection is not None and self._weights.decide(projection):
            return self._project(func, args, kwargs, projection)
        tensors = list({id(tensor): tensor for tensor in tensors_in((args, kwargs))}.values())
        output = self._run(func, args, kwargs, tensors)
        self._weights.settle(func, self._name, tensors, output)
        return output

    def _run(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Any:
        ledger = self._ledger
        if not any(ledger.entry(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        if (attention := as_attention(func, args, kwargs)) is not None:
            return self._attend(func, args, kwargs, attention, tensors)
        if (dropout := as_dropout(func, args, kwargs)) is not None and ledger.dim(dropout.input) is not None:
            return self._locally(func, args, kwargs, ledger.dim(dropout.input), tensors)
        if is_batched_matmul(func, args, kwargs):
            dim = batched_matmul_dim(args[0], args[1], ledger.dim(args[0]), ledger.dim(args[1]))
            if dim is not None:
                return self._locally(func, args, kwargs, dim, tensors)
        return self._generic(func, args, kwargs, tensors)

    def _generic(self, func: Function, args: Args, kwargs: Kwargs, tensors: Sequence[Tensor]) -> Any:
        """A call as DTensor runs it; on full tensors if it can't."""
        changed = destination(func, args, kwargs)
        if is_random(func) or (changed is not None and self._ledger.entry(changed) is None):
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
            raise PlanError(f"{self._name} changes a sharded tensor in place and has no sharded form")
        for tensor in tensors:
            self._ledger.gather(tensor, self._name)
        with self._ledger.closed():
            return func(*args, **kwargs)

    def _locally(self, func: Function, args: Args, kwargs: Kwargs, dim: int | None, tensors: Sequence[Tensor]) -> Any:
        """A call that every rank makes on its own shards; its result is sharded on `dim`."""
        assert dim is not None
        sources = self._ledger.sources(tensors)
        with self._ledger.closed():
            output = func(*args, **kwargs)
        self._ledger.put(output, Shard(dim), sources)
        return output

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

    def _project(self, func: Function, args: Args, kwargs: Kwargs, call: Projection) -> Any:
        """``input @ weight + bias`` with a sharded weight."""
        ledger, fqn = self._ledger, self._weights.fqn_of(call.weight)
        with ledger.closed():
            output = func(*args, **kwargs)
        self._weights.settle(func, self._name, [] if call.bias is None else [call.bias], output)
        self.output_bytes[fqn] = self.output_bytes.get(fqn, 0) + output.numel() * output.element_size()
        if ledger.dim(call.weight) == call.features_dim:
            ledger.gather(call.input, self._name)
            self.column_inputs[id(call.input), call.input._version] = call.input
            ledger.put(output, Shard(output.dim() - 1), frozenset({fqn}))
        else:
            if ledger.dim(call.input) != call.input.dim() - 1:
                ledger.gather(call.input, self._name)
            ledger.move(output, Partial(), Replicate(), ledger.sources([call.input]), self._name, row=fqn)
        return output

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
