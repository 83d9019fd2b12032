"""One kind of call of a block, compiled: what tells it from others, and what is computed in its place.

A compiled computation takes tensors: the arguments of the call and the tensors of the block's state. All other values
are compiled in; they form the key by which it is found again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.config.compile import CompileConfig
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.compiled.draws import Draws, draws_given
from lightning_3d.tensor.compiled.state import copied, own_part, read_state
from lightning_3d.tensor.compiled.values import STATIC_TYPES
from lightning_3d.tensor.placement import Partial, Sharded
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from lightning_3d.torch_internals.capture import Computation, NotCompilable, capture
from lightning_3d.torch_internals.dispatch import OpOverload
from lightning_3d.torch_internals.pytree import TreeSpec, tree_flatten, tree_unflatten

_PLAIN = (Tensor, nn.Parameter)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of a block, taken apart."""

    leaves: Sequence[Any]
    """Its flat arguments."""

    spec: TreeSpec
    """Their structure, (args, kwargs)."""

    tensors: Sequence[Tensor]
    """All that it computes with: arguments, then own parts of the state."""

    key: Hashable
    """Equal for calls that compute the same."""


def read_call(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Take a call of a block apart.

    Raises:
        NotCompilable: something that it reads can't be told apart.
    """
    leaves, spec = tree_flatten((args, kwargs))
    state = read_state(block)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)] + state.own()
    first: dict[int, int] = {}
    described = tuple([(_described(t), first.setdefault(id(t), i)) for i, t in enumerate(tensors)])
    values = tuple([None if isinstance(leaf, Tensor) else _static(leaf) for leaf in leaves])
    key = (spec, values, described, state.values, _modes(tensors))
    return Call(leaves=leaves, spec=spec, tensors=tensors, key=key)


def _described(tensor: Tensor) -> Hashable:
    if type(tensor) not in _PLAIN:
        raise NotCompilable(f"it reads a {type(tensor).__name__}")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference()


def _static(leaf: object) -> Hashable:
    if type(leaf) not in STATIC_TYPES and not isinstance(leaf, Enum):
        raise NotCompilable(f"an argument is a {type(leaf).__name__}, whose content could change from call to call")
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """A tensor among what a block returns."""

    axis: Axis | None = None
    placement: Sharded | Partial | None = None
    """How it is sharded; None if it is plain."""

    def of(self, own: Tensor) -> Tensor:
        if self.axis is None or self.placement is None:
            return own
        return ShardedTensor(own, self.axis, self.placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The results of a call that ran eagerly."""

    values: Sequence[Tensor]
    """Own parts of its results, and of the tensors of the block's state as they are then."""

    draws: Draws

    drawn: Sequence[Tensor]
    """The random numbers that it drew."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCall:
    """A block's computation for one kind of call."""

    computation: Computation
    """Takes all tensors of a call, and what it draws."""

    draws: Draws

    leaves: Sequence[Any]
    """Leaves of the output; a `_Result` where a result of the computation goes."""

    spec: TreeSpec

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        """Compute the block's output."""
        results = iter(self.computation(*tensors, *self.draws.draw()))
        leaves = [leaf.of(next(results)) if isinstance(leaf, _Result) else leaf for leaf in self.leaves]
        return tree_unflatten(leaves, self.spec)

    def computes(self, observed: Observed, call: Call) -> bool:
        """Whether it gives what was observed, within the square root of each dtype's epsilon."""
        tensors, expected = copied(call.tensors), observed.values
        with torch.no_grad():
            results = list(self.computation(*tensors, *observed.drawn))
        state = tensors[len(tensors) - (len(expected) - len(results)) :]
        return all(_is_close(found, wanted) for found, wanted in zip([*results, *state], expected, strict=True))


def compile_call(
    block: nn.Module,
    run: Callable[..., Any],
    call: Call,
    observed: Observed,
    config: CompileConfig,
    is_kept: Callable[[OpOverload], bool] | None = None,
) -> CompiledCall:
    """Compile a call, without running it.

    Args:
        block: Its modules hold the tensors.
        run: Its forward, which must do no more than compute (`observation`).
        call: The call of it to compile.
        observed: The same, run eagerly.
        config: By what.
        is_kept: As for `capture`.

    Raises:
        NotCompilable: it returns something else than tensors and static values, or draws other random numbers.
        Exception: as `capture`.
    """
    state = read_state(block)
    num_tensors = len(call.tensors)
    num_arguments = num_tensors - len(state.tensors)
    answer: dict[str, Any] = {}

    def computation(*tensors: Tensor) -> Sequence[Tensor]:
        arguments = iter(tensors[:num_arguments])
        leaves = [next(arguments) if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = tree_unflatten(leaves, call.spec)
        given = draws_given(observed.draws, tensors[num_tensors:])
        with state.replaced(tensors[num_arguments:num_tensors]), given:
            output, answer["spec"] = tree_flatten(run(*args, **kwargs))
        answer["leaves"] = [_result_of(leaf) for leaf in output]
        return [own_part(leaf) for leaf in output if isinstance(leaf, Tensor)]

    examples = [*map(_example, call.tensors), *observed.drawn]
    made = capture(computation, examples, config.backend, config.mode, is_kept)
    return CompiledCall(computation=made, draws=observed.draws, leaves=answer["leaves"], spec=answer["spec"])


def _example(tensor: Tensor) -> Tensor:
    """Without history, which tracing does not need."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _result_of(leaf: object) -> object:
    if isinstance(leaf, ShardedTensor):
        return _Result(axis=leaf.axis, placement=leaf.placement)
    if isinstance(leaf, Tensor):
        return _Result()
    if type(leaf) not in STATIC_TYPES and not isinstance(leaf, Enum):
        raise NotCompilable(f"it returns a {type(leaf).__name__}")
    return leaf


def _is_close(found: Tensor, wanted: Tensor) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point() or wanted.numel() == 0:
        return torch.equal(found, wanted)
    finite = wanted[wanted.isfinite()]
    tolerance = torch.finfo(wanted.dtype).eps ** 0.5
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(found, wanted, rtol=0.0, atol=tolerance * largest, equal_nan=True)
