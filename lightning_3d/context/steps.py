"""Running a user's step on slices: the first activation of each kind that meets a block is cut along its sequence.

    tokens (B, T) --> embedding (B, T, D) --> first block: slices (B, T / ranks, D) --> ... --> logits --> loss
    whole                                     sharded from here on                                         whole

Integers of the batch stay whole. From the first block on all that comes of the sequence is sharded, in blocks and in
the code around them, and what the step gives is whole again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_3d.config.context import ContextConfig
from lightning_3d.context.axis import ContextAxis
from lightning_3d.context.boundary import placement_between_stages, slice_between_stages
from lightning_3d.context.choice import Sequences
from lightning_3d.context.dims import SequenceDims
from lightning_3d.context.interpreter import ContextInterpreter
from lightning_3d.errors import PlanError
from lightning_3d.model.block_runner import running
from lightning_3d.model.pytrees import with_replaced_leaves
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import REPLICATE, chunked
from lightning_3d.sharding.sealed_tensor import SealedTensor, opened, sealed
from lightning_3d.sharding.sharded_tensor import ShardedTensor, change_kept
from lightning_3d.torch_internals.autograd import is_reentrant, recomputed_by
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.dispatch import DisableTorchFunction
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Trace


class ContextSteps:
    """Runs steps of one model on this rank's slices.

    Args:
        module: The user's module.
        blocks: Its blocks by FQN, which cut what they get.
        axis: The axis that sequences are cut over.
        config: How.
        cuts_features: Whether blocks may have shards of their weights over another axis.
    """

    def __init__(
        self,
        module: nn.Module,
        blocks: Mapping[str, nn.Module],
        axis: ContextAxis,
        config: ContextConfig,
        *,
        cuts_features: bool = False,
    ) -> None:
        self._module, self._axis, self._dims = module, axis, SequenceDims(config, blocks)
        self._interpreter = ContextInterpreter(axis, config, is_outer=cuts_features)
        self.config = config
        self._is_running = False
        self.has_sequence = False
        """Whether a block on this rank has ever got a sequence."""
        self._seen: dict[str, list[str]] = {}  # what blocks got that is no sequence
        self._cutters = [(block, functools.partial(self._on_slices, fqn, block)) for fqn, block in blocks.items()]

    def run(self, step: Callable[[], Any], *, gathers: bool = True) -> Any:
        """Run a step, or a stage of one on a microbatch; what it keeps in attributes of the module is whole.

        Args:
            gathers: Whether what it returns is, too, in place of slices as plain tensors.
        """
        for block, cutter in self._cutters:
            running(block).sliced = cutter  # blocks that are here in full lose their runners after a fit
        self._interpreter.begin()
        with self._modes():
            output = step()
        self._interpreter.check_copies()
        with DisableTorchFunction():
            output = tree_map(self._whole if gathers else _own, output)
            for module in self._module.modules():
                change_kept(vars(module), self._whole, (ShardedTensor, SealedTensor))
        self._interpreter.forget()
        return output

    def no_sequence(self) -> PlanError:
        """That no block has got a sequence."""
        got = "; ".join(f"{fqn}: {', '.join(shapes)}" for fqn, shapes in self._seen.items()) or "no block was called"
        return PlanError(
            f"context_parallel_size={self._axis.size} found no sequence to cut: no block got an activation of shape"
            f" (batch, sequence, features) ({got}). Let context.dims say where sequences lie, or use"
            " context_parallel_size=1."
        )

    @property
    def moves(self) -> list[tuple[str, int]]:
        """Each kind of call whose operands move between ranks, for people, and the bytes that each sends for one."""
        moves = self._interpreter.moves_by_call.items()
        return [(f"{name}, first in {block or 'no block'}, on slices: {how}", n) for (name, how, n), block in moves]

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor that a step has; a plain one is that already."""
        with DisableTorchFunction():
            return self._whole(tensor)  # type: ignore[no-any-return]

    def crossing(self, trace: Trace, i: int) -> TensorMeta:
        """The part of a tensor that this rank sends to the next stage, or receives; i: its id in the trace."""
        return slice_between_stages(trace, i, self._dims, self._axis.size, self._axis.rank)

    def sent(self, trace: Trace, i: int, tensor: Tensor) -> Tensor:
        """A tensor of a step as this rank sends it to the next stage; i: its id in the trace."""
        at = placement_between_stages(trace, i, self._dims, self._axis.size)
        if at is None:
            return self.whole(tensor)
        with DisableTorchFunction():
            tensor = opened(tensor)
            if not isinstance(tensor, ShardedTensor):
                return redistribute(tensor, self._axis, REPLICATE, at)
            return self._interpreter.moved(tensor, at)

    def received(self, trace: Trace, i: int, tensor: Tensor) -> Tensor:
        """A tensor that was sent so, as a step that runs has it."""
        at = placement_between_stages(trace, i, self._dims, self._axis.size)
        if at is None:
            return tensor
        self._note_sequence(trace.tensors[i].shape, at.dim)
        with DisableTorchFunction():
            return ShardedTensor(tensor, self._axis, at)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        self._is_running = True
        try:
            with (
                self._interpreter.statistics,
                self._interpreter,
                custom_functions_seen(self._on_custom_function),
                recomputed_by(self._again),
            ):
                yield
        finally:
            self._is_running = False

    def _on_custom_function(self, cls: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        if is_reentrant(cls):
            return self._interpreter.on_reentrant_checkpoint(function, self._again(args[0]), *args[1:], **kwargs)
        return self._interpreter.on_custom_function(cls, function, args, kwargs)

    def _again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function of a checkpoint, which the backward runs when the step has ended."""

        def run(*args: object, **kwargs: object) -> Any:
            if self._is_running:
                return function(*args, **kwargs)
            self._interpreter.forget()
            with self._modes():
                return function(*args, **kwargs)

        return run

    def _on_slices(
        self,
        fqn: str,
        block: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Make a call of a block on slices; to the interpreter of its features, if it has one, these are sealed."""
        self._interpreter.block = fqn
        args, kwargs = self._sliced(fqn, args, kwargs)
        if not self._is_running or running(block).sharded is None:
            return call(*args, **kwargs)
        args, kwargs = with_replaced_leaves((args, kwargs), self._sealed)  # in lists and dicts, too
        try:
            return with_replaced_leaves(call(*args, **kwargs), opened)
        finally:
            with_replaced_leaves((args, kwargs), opened)

    def _sliced(
        self, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a block, with its first activation cut, if that is whole."""
        if not self._is_running:
            return args, kwargs
        self._interpreter.forget()
        values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if any(isinstance(value, ShardedTensor) for value in values):
            self.has_sequence = True
            return args, kwargs
        sequences = ((value, self._dims.of(fqn, value.dim())) for value in values if value.is_floating_point())
        first, dim = next(((value, dim) for value, dim in sequences if dim is not None), (None, 0))
        if first is None:
            self._seen.setdefault(fqn, [str(tuple(value.shape)) for value in values])
            return args, kwargs
        self.has_sequence = True
        if first.shape[dim] < self._axis.size:  # every rank runs all of it
            return args, kwargs
        with DisableTorchFunction():
            cut = self._cut(first, dim)
        given = tuple(cut if value is first else value for value in args)
        return given, {name: cut if value is first else value for name, value in kwargs.items()}

    def _cut(self, tensor: Tensor, dim: int) -> ShardedTensor:
        self._note_sequence(tensor.shape, dim)
        at = chunked(dim, tensor.shape[dim], self._axis.size)
        own = redistribute(tensor, self._axis, REPLICATE, at)
        return ShardedTensor(own if tensor.requires_grad else own.clone(), self._axis, at)

    def _note_sequence(self, shape: Sequence[int], dim: int) -> None:
        lengths = self._interpreter.sequences.lengths
        samples = 0 if dim else min(1, len(shape) - 1)  # of the first two dims the other one
        self._interpreter.sequences = Sequences(lengths=lengths | {shape[dim]}, batch=shape[samples], batch_dim=samples)

    def _sealed(self, leaf: Any) -> Any:
        return sealed(leaf) if isinstance(leaf, ShardedTensor) and leaf.axis is self._axis else leaf

    def _whole(self, leaf: Any) -> Any:
        leaf = opened(leaf)
        is_own = isinstance(leaf, ShardedTensor) and leaf.axis is self._axis
        return self._interpreter.whole(leaf) if is_own else leaf


def _own(leaf: Any) -> Any:
    """This rank's part of a tensor."""
    leaf = opened(leaf)
    return leaf.own() if isinstance(leaf, ShardedTensor) else leaf
