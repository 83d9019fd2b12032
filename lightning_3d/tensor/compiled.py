"""Blocks compiled one by one: what a block computes on this rank's shards, captured once for each kind of call.

    call -> key: arguments, state of the block, modes -> known? -> the compiled computation, or eagerly
                                                      -> new:   run it once to see that it only computes, trace, compile

What makes a block uncompilable is found before anything compiled runs, and all ranks of the tp group decide alike, as
what is compiled may leave out collectives that nobody needs.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_3d.pipeline.interception import is_answered, set_finish, take_finish
from lightning_3d.tensor import crossing
from lightning_3d.tensor.block_state import (
    STATIC_TYPES,
    BlockState,
    NotCompilable,
    check_computes_only,
    read_state,
)
from lightning_3d.tensor.capture import Computation, capture
from lightning_3d.tensor.plan import BlockTensorPlan
from lightning_3d.tensor.sharded_activation import ShardedActivation

_PLAIN = (Tensor, nn.Parameter)
_MAX_REASON = 300
"""Characters of another's error that a warning tells."""


@dataclass(kw_only=True, slots=True)
class _Call:
    """One call of a block, taken apart."""

    leaves: Sequence[Any]
    """Its flat arguments."""

    spec: TreeSpec
    state: BlockState

    tensors: Sequence[Tensor]
    """All that the computation reads: arguments, then the state, own shards in place of DTensors."""

    key: Hashable


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A tensor among what a block returns."""

    mesh: DeviceMesh | None = None
    dim: int | None = None
    """What it is sharded on; None if it is plain."""

    def of(self, tensor: Tensor) -> Tensor:
        if self.mesh is None or self.dim is None:
            return tensor
        return crossing.as_sharded(tensor, self.mesh, self.dim)


@dataclass(kw_only=True, slots=True)
class _Compiled:
    computation: Computation
    leaves: Sequence[Any]
    """Of the output; a `_Result` where a result of the computation goes."""

    spec: TreeSpec

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        results = iter(self.computation(*tensors))
        leaves = [leaf.of(next(results)) if isinstance(leaf, _Result) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)


class BlockCompiler:
    """Compiles the blocks of one model; blocks that compute the same share what is compiled.

    Args:
        mesh: The tp axis.
        backend: As for ``torch.compile``.
    """

    def __init__(self, mesh: DeviceMesh, backend: str) -> None:
        self._mesh, self._backend = mesh, backend
        self._known: dict[Hashable, _Compiled | NotCompilable] = {}
        self._warned: set[str] = set()

    def compiled(self, block: nn.Module, plan: BlockTensorPlan, run: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a block, compiled for each kind of call when it first comes.

        Args:
            block: Its modules hold the parameters.
            plan: How it is sharded.
            run: Its eager forward on shards.
        """
        kind, own_keys = (type(block), repr(block), plan), set[Hashable]()

        @functools.wraps(run)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if is_answered(block):
                return run(*args, **kwargs)
            finish = take_finish(block)  # runs what is compiled; eagerly it runs the block's own forward
            try:
                compiled = self._find(block, run, _read_call(block, kind, args, kwargs), own_keys)
            except NotCompilable as reason:
                self._warn(block, str(reason))
                if finish is not None:
                    set_finish(block, finish)
                return run(*args, **kwargs)
            return compiled() if finish is None else finish(lambda *args, **kwargs: compiled(), args, kwargs)

        return forward

    def _find(
        self, block: nn.Module, run: Callable[..., Any], call: _Call, own_keys: set[Hashable]
    ) -> Callable[[], Any]:
        """What answers a call.

        Raises:
            NotCompilable: it runs eagerly.
        """
        if call.key not in own_keys:
            if len(own_keys) == torch._dynamo.config.recompile_limit:
                raise NotCompilable(f"it was called in more than {len(own_keys)} ways (shapes, values, modes)")
            own_keys.add(call.key)
        if call.key not in self._known:
            self._known[call.key] = self._compile(block, run, call)
        known = self._known[call.key]
        if isinstance(known, NotCompilable):
            raise known
        return functools.partial(known, call.tensors)

    def _compile(self, block: nn.Module, run: Callable[..., Any], call: _Call) -> _Compiled | NotCompilable:
        made: _Compiled | NotCompilable
        try:
            check_computes_only(block, run, call.leaves, call.spec, _device(self._mesh))
            made = _compile(block, run, call, self._backend)
        except torch.OutOfMemoryError:
            raise
        except NotCompilable as reason:
            made = reason
        except Exception as error:  # of tracing, of the compiler, or of the block itself, which eagerly says so
            made = NotCompilable(f"{type(error).__name__}: {error}")
        if self._all(isinstance(made, _Compiled)) or isinstance(made, NotCompilable):
            return made
        return NotCompilable("another rank can't compile it")

    def _all(self, is_true: bool) -> bool:
        agreed = torch.tensor(int(is_true), device=_device(self._mesh))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        return bool(agreed)

    def _warn(self, block: nn.Module, reason: str) -> None:
        """Once for each class of blocks."""
        name = type(block).__name__
        if name in self._warned or self._mesh.get_local_rank() != 0:
            return
        self._warned.add(name)
        reason = " ".join(reason.split())
        reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
        warnings.warn(f"tensor.compile: {name} runs eagerly, at least in part: {reason}", stacklevel=3)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


# ------------------------------------------------------------------------------------------------------------- keys


def _read_call(block: nn.Module, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
    leaves, spec = tree_flatten((args, kwargs))
    state = read_state(block)
    arguments = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    tensors = [*arguments, *map(_own, state.tensors)]
    first: dict[int, int] = {}
    of_tensors = tuple([(_described(t), first.setdefault(id(t), i)) for i, t in enumerate(tensors)])
    values = tuple([None if isinstance(leaf, Tensor) else _static(leaf) for leaf in leaves])
    key = (kind, spec, values, of_tensors, state.values, _modes(tensors))
    return _Call(leaves=leaves, spec=spec, state=state, tensors=tensors, key=key)


def _own(tensor: Tensor) -> Tensor:
    return crossing.local_shard(tensor) if isinstance(tensor, DTensor | ShardedActivation) else tensor


def _described(tensor: Tensor) -> Hashable:
    if type(tensor) not in _PLAIN:
        raise NotCompilable(f"it reads a {type(tensor).__name__}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference()


def _static(leaf: object) -> Hashable:
    if type(leaf) not in STATIC_TYPES and not isinstance(leaf, Enum):
        raise NotCompilable(f"an argument is a {type(leaf).__name__}, which may change without its call changing")
    return type(leaf), leaf


def _modes(tensors: Sequence[Tensor]) -> Hashable:
    kind = tensors[0].device.type if tensors else "cpu"
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


# -------------------------------------------------------------------------------------------------------- compiling


def _compile(block: nn.Module, run: Callable[..., Any], call: _Call, backend: str) -> _Compiled:
    state = read_state(block)  # anew: running the block once has put its attributes back
    num_arguments = len(call.tensors) - len(state.tensors)
    answer: dict[str, Any] = {}

    def computation(*tensors: Tensor) -> Sequence[Tensor]:
        arguments = iter(tensors[:num_arguments])
        leaves = [next(arguments) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        stand_ins = [_like(old, own) for old, own in zip(state.tensors, tensors[num_arguments:], strict=True)]
        try:
            state.replaced(stand_ins)
            output = run(*args, **kwargs)
        finally:
            state.replaced(state.tensors)
        leaves, answer["spec"] = tree_flatten(output)
        answer["leaves"] = [_result_of(leaf) for leaf in leaves]
        return [_own(leaf) for leaf in leaves if isinstance(leaf, Tensor)]

    made = capture(computation, [_example(tensor) for tensor in call.tensors], backend)
    return _Compiled(computation=made, leaves=answer["leaves"], spec=answer["spec"])


def _like(old: Tensor, own: Tensor) -> Tensor:
    """A stand-in for a tensor of the block's state: a DTensor for a DTensor, a parameter for a parameter."""
    if isinstance(old, DTensor):
        own = DTensor.from_local(
            own, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
        )
    if isinstance(old, nn.Parameter):
        own._is_param = True  # as in `own_shard`
    return own


def _example(tensor: Tensor) -> Tensor:
    """Without history, which tracing does not need."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _result_of(leaf: object) -> object:
    if isinstance(leaf, ShardedActivation):
        return _Result(mesh=leaf.mesh, dim=leaf.shard_dim)
    if isinstance(leaf, Tensor):
        return _Result()
    if type(leaf) not in STATIC_TYPES and not isinstance(leaf, Enum):
        raise NotCompilable(f"it returns a {type(leaf).__name__}")
    return leaf
