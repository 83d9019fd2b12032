"""The forward of a block whose parameters are sharded: it takes the place of its own.

Activations that the block retains in attributes, as ``self.weights = weights``, stay readable afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import running
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.placement import Sharded
from lightning_3d.sharding.sealed_tensor import SealedTensor
from lightning_3d.sharding.sharded_tensor import ShardedTensor, change_kept, shard_dim
from lightning_3d.tensor.interpreter import TensorInterpreter
from lightning_3d.tensor.own_shard import own_shard
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.sequence import cut_sequence
from lightning_3d.tensor.vocabulary.lazy_tensor import lazily_gathered
from lightning_3d.tensor.vocabulary.weight_roles import VocabularyCalls
from lightning_3d.torch_internals import flex_attention
from lightning_3d.torch_internals.autograd import is_reentrant, recomputed_by
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import count_as_parameter

Slot = tuple[nn.Module, str, Sharded | None]
"""Where a parameter hangs: the module that owns it, its name there, and how it is sharded; None: replicated."""

Run = Callable[[TensorInterpreter, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a forward on sharded tensors: the interpreter of this call, and its arguments."""


class ShardedForward:
    """Runs a block's own forward on shards.

    Args:
        block: Its parameters are sharded as planned.
        plan: The plan of this block.
        axis: The axis that they are sharded over.
        slots: The places of its parameters, but for those sharded over the vocabulary.
        vocabulary: Where the weights sharded over the vocabulary hang, and their names there.
    """

    def __init__(
        self,
        block: nn.Module,
        plan: BlockTensorPlan,
        axis: MeshAxis,
        slots: Sequence[Slot],
        vocabulary: Sequence[tuple[nn.Module, str]],
    ) -> None:
        self._forward, self.plan, self._axis = running(block).innermost, plan, axis
        self._slots, self._vocabulary = slots, vocabulary
        self.modules = list(block.modules())
        self._is_running = False

    @property
    def has_vocabulary(self) -> bool:
        """Whether weights are sharded over the vocabulary."""
        return bool(self._vocabulary)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """The block's output: plain tensors, lazily gathered ones where nothing is known to read them."""
        return self.on_shards(self._run, args, kwargs)

    def on_shards(self, run: Run, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """The same, by what takes and gives sharded tensors."""
        args, sequence = cut_sequence(args, self._axis) if self.plan.is_sequence_parallel else (args, None)
        interpreter = self.interpreter(sequence)
        output = run(interpreter, args, kwargs)
        interpreter.make_buffers_whole(self.modules)
        for module in self.modules:
            _gather_retained(vars(module), interpreter.whole)
        if not (unused := self.plan.unused_outputs) or any(map(_is_sealed, tree_leaves(output))):
            return interpreter.gathered(output, frozenset())
        return tree_map(_lazy_if_sharded, interpreter.gathered(output, unused))

    def _run(self, interpreter: TensorInterpreter, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        with self.parameters(), self.modes(interpreter):
            return self._forward(*args, **kwargs)

    def interpreter(self, sequence: torch.Size | None) -> TensorInterpreter:
        """A new one, for one forward.

        Args:
            sequence: As for `Interpreter`.
        """
        return TensorInterpreter(self._axis, sequence, data_dependent_routing=self.plan.data_dependent_routing)

    @contextmanager
    def modes(self, interpreter: TensorInterpreter) -> Iterator[None]:
        """Let calls on sharded tensors inside be answered."""
        vocabulary = (
            VocabularyCalls(interpreter, self._vocabulary, gathers_logits=self.plan.gathers_logits)
            if self._vocabulary
            else nullcontext()
        )

        def again(function: Callable[..., Any]) -> Callable[..., Any]:
            return functools.partial(self._recompute, interpreter.sequence, function)

        def on_custom_function(cls: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
            if is_reentrant(cls):
                args = (again(args[0]), *args[1:])
            return interpreter.on_custom_function(cls, function, args, kwargs)

        with (
            interpreter.statistics,
            interpreter,
            vocabulary,
            flex_attention.calls_seen(),
            custom_functions_seen(on_custom_function),
            recomputed_by(again),
        ):
            yield

    @contextmanager
    def parameters(self, form: Callable[[Tensor], Tensor] = lambda own: own) -> Iterator[None]:
        """Let the block's code find this rank's parts: plain tensors of what is replicated, else sharded tensors.

        Args:
            form: Applied to each of them.
        """
        if self._is_running:  # its forward takes gradients, which compute it again
            yield
            return
        self._is_running = True
        try:
            with _own_parameters(self._slots, self._axis, form):
                yield
        finally:
            self._is_running = False

    def _recompute(
        self, sequence: torch.Size | None, function: Callable[..., object], *args: object, **kwargs: object
    ) -> Any:
        """Run the function of a checkpoint inside of the block: in the forward, if reentrant, and in the backward."""
        if self._is_running:
            return function(*args, **kwargs)
        with self.parameters(), self.modes(self.interpreter(sequence)):
            return function(*args, **kwargs)


@contextmanager
def _own_parameters(slots: Sequence[Slot], axis: MeshAxis, form: Callable[[Tensor], Tensor]) -> Iterator[None]:
    found: list[tuple[dict[str, Any], str, DTensor]] = []
    own: dict[int, Tensor] = {}
    try:
        for owner, name, placement in slots:
            parameters: dict[str, Any] = parameters_of(owner)
            if not isinstance(parameters.get(name), DTensor):
                raise StepError(
                    f"The parameter {name} of a {type(owner).__name__}, which tensor parallel shards, is gone: pruning,"
                    " weight_norm and the like put another in its place. Apply them before fit, or use"
                    " tensor_parallel_size=1."
                )
            parameter = parameters[name]
            if id(parameter) not in own:
                own[id(parameter)] = form(_own_parameter(parameter, axis, placement))
            found.append((parameters, name, parameter))
            parameters[name] = own[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in found:
            parameters[name] = parameter


def _own_parameter(parameter: DTensor, axis: MeshAxis, placement: Sharded | None) -> Tensor:
    local = own_shard(parameter)
    if placement is None:
        return local
    weight = ShardedTensor(local, axis, placement, is_weight=True)
    count_as_parameter(weight)  # as what a block's code finds
    return weight


def _gather_retained(attributes: dict[str, object], whole: Callable[[Tensor], Tensor]) -> None:
    """Replace sharded tensors in a module's attributes by full ones, which are gathered when they are read."""

    def shown(leaf: object) -> Any:
        if not isinstance(leaf, ShardedTensor):
            return leaf
        return whole(leaf) if shard_dim(leaf) is None or _is_sealed(leaf) else lazily_gathered(leaf)

    change_kept(attributes, shown)


def _is_sealed(leaf: object) -> bool:
    """Whether another axis, too, cuts a sharded tensor: it is gathered at once."""
    return isinstance(leaf, ShardedTensor) and isinstance(leaf.local, SealedTensor)


def _lazy_if_sharded(leaf: object) -> Any:
    return lazily_gathered(leaf) if isinstance(leaf, ShardedTensor) else leaf
