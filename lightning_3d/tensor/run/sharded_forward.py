"""The forward of a block whose parameters are sharded: what takes the place of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.model.block_runner import running
from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.rules.grouped import GroupedTensor
from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM, sequence_input
from lightning_3d.tensor.run import crossing
from lightning_3d.tensor.run.grouped_calls import whole
from lightning_3d.tensor.run.kept import KeptActivations
from lightning_3d.tensor.run.sharded_activation import ShardedActivation
from lightning_3d.tensor.run.sharded_calls import ShardedCalls
from lightning_3d.tensor.run.sharded_output import as_unread
from lightning_3d.tensor.vocabulary.uses import VocabularyCalls
from lightning_3d.torch_internals.autograd_functions import custom_functions_seen
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pytree import tree_flatten, tree_map, tree_unflatten
from lightning_3d.torch_internals.recompute import is_reentrant, recomputed_by

Slot = tuple[nn.Module, str, Parts | None]
"""Where a parameter hangs: the module that owns it, its name there, and its parts if it is sharded part by part."""


class ShardedForward:
    """Runs a block's own forward on shards.

    Args:
        block: Its parameters are sharded as planned.
        plan: Of this block.
        mesh: The tp axis.
        slots: Of parameters that are replicated or sharded part by part.
        vocabulary: Where the weights sharded over the vocabulary hang, and their names there.
    """

    def __init__(
        self,
        block: nn.Module,
        plan: BlockTensorPlan,
        mesh: DeviceMesh,
        slots: Sequence[Slot],
        vocabulary: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self._forward, self._plan, self._mesh = running(block).innermost, plan, mesh
        self._slots, self._vocabulary = slots, vocabulary
        self._kept = KeptActivations(block)
        self._is_running = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output: plain tensors, and shards of what nothing reads."""
        sequence = sequence_input(args, self._mesh.size()) if self._plan.is_sequence_parallel else None
        if sequence is not None:
            args = (crossing.slice_sequence(sequence, self._mesh, SEQUENCE_DIM), *args[1:])
        with self._modes(None if sequence is None else sequence.shape):
            output = self._forward(*args, **kwargs)
        self._kept.show()
        return _gathered(output, self._plan.unread)

    @contextmanager
    def _modes(self, sequence: torch.Size | None) -> Iterator[None]:
        calls = ShardedCalls(self._mesh, sequence, defers_sums=self._plan.defers_sums)
        vocabulary = (
            VocabularyCalls(self._mesh, self._vocabulary, gathers_logits=self._plan.gathers_logits)
            if self._vocabulary
            else nullcontext()
        )

        def again(function: Callable[..., Any]) -> Callable[..., Any]:
            return functools.partial(self._recompute, sequence, function)

        def on_custom_function(cls: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            if is_reentrant(cls):
                args = (again(args[0]), *args[1:])
            return calls.on_custom_function(cls, function, args, kwargs)

        with (
            calls.statistics,
            _local_parameters(self._slots),
            calls,
            vocabulary,
            custom_functions_seen(on_custom_function),
            recomputed_by(again),
        ):
            self._is_running = True
            try:
                yield
            finally:
                self._is_running = False

    def _recompute(self, sequence: torch.Size | None, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a checkpoint inside of the block calls: in the forward, if it is reentrant, and in the backward."""
        with nullcontext() if self._is_running else self._modes(sequence):
            return function(*args, **kwargs)


@contextmanager
def _local_parameters(slots: Sequence[Slot]) -> Iterator[None]:
    """Let the block's code find replicated parameters as plain tensors, which also suits custom autograd functions.

    Those that are sharded part by part it finds as what they are.
    """
    found: list[tuple[dict[str, Any], str, DTensor]] = []
    local: dict[int, Tensor] = {}
    try:
        for owner, name, parts in slots:
            parameters: dict[str, Any] = parameters_of(owner)
            parameter = parameters[name]
            if id(parameter) not in local:
                own = crossing.local_shard(parameter)
                local[id(parameter)] = own if parts is None else _in_parts(own, parameter, parts)
            found.append((parameters, name, parameter))
            parameters[name] = local[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in found:
            parameters[name] = parameter


def _in_parts(own: Tensor, parameter: DTensor, parts: Parts) -> GroupedTensor:
    weight = GroupedTensor(own, parameter.device_mesh, parts)
    weight.is_weight = True
    return weight


def _gathered(output: Any, unread: frozenset[int]) -> Any:
    """Plain tensors, but for what nothing reads."""
    if not unread:
        return tree_map(_plain, output)
    leaves, spec = tree_flatten(output)
    gathered = [
        leaf if i in unread and isinstance(leaf, ShardedActivation) else _plain(leaf) for i, leaf in enumerate(leaves)
    ]
    return tree_unflatten(gathered, spec)


def _plain(leaf: Any) -> Any:
    return whole(leaf) if isinstance(leaf, Tensor) else leaf


def without_shards(output: Any) -> Any:
    """Return unread outputs as lazily gathered tensors."""
    return tree_map(lambda leaf: as_unread(leaf) if isinstance(leaf, ShardedActivation) else leaf, output)
