"""Compiling sharded blocks: Dynamo follows the dense forward, and what is compiled is its graph on this rank's shards.

    called      the block's sharded tensors hide behind stand-ins of full shapes, which have no memory
    followed    Dynamo reads the forward as that of a dense block; guards, mutations and attributes are its own affair
    first run   the interpreter runs the graph inside of AOTAutograd on the shards; the backend gets what they compute
    run         shards take the places of stand-ins, and what is compiled takes that of the graph

All ranks compile a graph, or none does, as what is compiled may leave out collectives that nobody needs: one vote.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.interpreter import TensorInterpreter
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.sharded_forward import ShardedForward
from lightning_3d.torch_internals.capture import Computation, NotCompilable
from lightning_3d.torch_internals.dispatch import HigherOrderOperator
from lightning_3d.torch_internals.dynamo import compiler_errors, is_limit
from lightning_3d.torch_internals.modules import TORCH_ATTRIBUTES
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map

Capture = Callable[[Computation, Sequence[Tensor]], Computation]
"""Compiles a function of tensors; takes examples of these."""


class Shards:
    """Calls of one sharded block.

    Args:
        forward: Its forward on shards.
        mesh: The tp axis.
    """

    def __init__(self, forward: ShardedForward, mesh: DeviceMesh) -> None:
        self.forward, self._mesh = forward, mesh
        self._stand_ins: dict[Hashable, Tensor] = {}

    @property
    def plan(self) -> BlockTensorPlan:
        """Blocks of one class with equal plans compute the same."""
        return self.forward.plan

    def run(self, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """The output of the block, by a call on stand-ins that runs a `ShardedGraph`.

        Raises:
            NotCompilable: this kind of call can't be compiled, here or on another rank.
            Exception: as `compiled`.
        """
        return self.forward.on_shards(partial(self._on_stand_ins, call), args, kwargs)

    def _on_stand_ins(
        self, call: AnyCallable, interpreter: TensorInterpreter, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        present = _Present(self, interpreter)
        with self.forward.parameters(present.stand_in), present.set():
            stand_ins = [present.stand_in(arg) for arg in args]
            try:
                output = call(*stand_ins, **kwargs)
            except compiler_errors() as error:
                if not (present.reached_graph or is_limit(error)):
                    self.vote(False)
                raise
        if any(stand_in is not arg for stand_in, arg in zip(stand_ins, args, strict=True)):
            self._gather_retained(present)
        return tree_map(present.sharded, output)

    def _gather_retained(self, present: _Present) -> None:
        """Replace stand-ins that the block has left in attributes."""
        for module in self.forward.modules:
            for name, value in vars(module).items():
                is_holder = name not in TORCH_ATTRIBUTES and isinstance(value, Tensor | list | tuple | dict)
                if is_holder and any(present.sharded(leaf) is not leaf for leaf in tree_leaves(value)):
                    vars(module)[name] = tree_map(present.sharded, value)

    def stand_in(self, tensor: ShardedTensor, at: int) -> Tensor:
        """A tensor of the full shape without memory, the same in every call."""
        key = at, tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad
        if key not in self._stand_ins:
            with torch.inference_mode(False):
                blank = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
                blank.untyped_storage().resize_(0)
                needs = tensor.requires_grad
                self._stand_ins[key] = nn.Parameter(blank, needs) if tensor.is_weight else blank.requires_grad_(needs)
        return self._stand_ins[key]

    def vote(self, is_able: bool) -> bool:
        """Whether all ranks are able."""
        kind = self._mesh.device_type
        device = kind if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        able = torch.tensor(int(is_able), device=device)
        dist.all_reduce(able, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        return bool(able)


class _Present:
    """The call that is under way."""

    def __init__(self, shards: Shards, interpreter: TensorInterpreter) -> None:
        self.shards, self._interpreter = shards, interpreter
        self._hidden: dict[int, ShardedTensor] = {}  # by the id of its stand-in
        self.reached_graph = False
        """Whether a graph has run, or has said why it can't."""

    @contextmanager
    def set(self) -> Iterator[None]:
        token = _PRESENT.set(self)
        try:
            yield
        finally:
            _PRESENT.reset(token)

    def stand_in(self, tensor: object) -> Any:
        """The stand-in of a sharded tensor; anything else as it is."""
        if not isinstance(tensor, ShardedTensor):
            return tensor
        stand_in = self.shards.stand_in(tensor, len(self._hidden))
        self._hidden[id(stand_in)] = tensor
        return stand_in

    def sharded(self, leaf: object) -> object:
        """The sharded tensor behind a stand-in; anything else as it is."""
        return self._hidden.get(id(leaf), leaf)

    def modes(self) -> AbstractContextManager[None]:
        """Answer calls on shards inside, as in this call."""
        return self.shards.forward.modes(self.shards.forward.interpreter(self._interpreter.sequence))


_PRESENT: ContextVar[_Present] = ContextVar("present")

_SETTING_DATA = (Tensor.set_, "set_")
"""Calls in graphs of Dynamo's for ``tensor.data = ...`` and ``tensor.set_(...)``."""


class ShardedGraph:
    """Runs a graph of a dense forward on shards, compiled when it first runs.

    Args:
        capture: Compiles what it computes.
        graph: Dynamo's.

    Raises:
        NotCompilable: the graph has calls that the interpreter does not see through.
    """

    def __init__(self, capture: Capture, graph: GraphModule) -> None:
        for node in graph.graph.nodes:
            if isinstance(node.target, HigherOrderOperator):
                raise NotCompilable("it has a checkpoint, an autograd function or a loop inside, which no rule follows")
            if node.target in _SETTING_DATA:
                raise NotCompilable("it sets the data of a tensor")
        self._capture, self._graph = capture, graph
        self._made: Computation | str | None = None  # a string: why it can't be compiled
        self._results: list[Callable[[Tensor], Tensor] | None] = []  # how sharded results lie; None of plain ones

    def __call__(self, *inputs: object) -> list[Tensor]:
        """The results of the graph, some of them sharded tensors.

        Raises:
            NotCompilable: it has to run eagerly; nothing has run yet.
        """
        present = _PRESENT.get()
        present.reached_graph = True
        given = [present.sharded(tensor) for tensor in inputs]
        own = [tensor.own() if isinstance(tensor, ShardedTensor) else tensor for tensor in given]
        if self._made is None:
            self._made = self._compile(present, given, own)
        if isinstance(self._made, str):
            raise NotCompilable(self._made)
        results = self._made(*own)
        return [own if make is None else make(own) for make, own in zip(self._results, results, strict=True)]

    def _compile(self, present: _Present, given: Sequence[object], own: Sequence[Any]) -> Computation | str:
        made, reason = None, "another rank can't compile it"
        try:
            made = self._capture(partial(self._compute, present, given), own)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of tracing, of the compiler, or of the block itself, which eagerly says so
            reason = str(error) if isinstance(error, NotCompilable) else f"{type(error).__name__}: {error}"
        is_agreed = present.shards.vote(made is not None)
        return made if made is not None and is_agreed else reason

    def _compute(self, present: _Present, given: Sequence[object], *own: Tensor) -> list[Tensor]:
        """The graph on other tensors like those that are given."""
        inputs = [_like(tensor, local) for tensor, local in zip(given, own, strict=True)]
        with present.modes():
            outputs = self._graph(*inputs)
        self._results = [partial(_like, output) if isinstance(output, ShardedTensor) else None for output in outputs]
        return [output.own() if isinstance(output, ShardedTensor) else output for output in outputs]


def _like(tensor: object, local: Tensor) -> Tensor:
    """Sharded as another is; a plain tensor as it is."""
    if not isinstance(tensor, ShardedTensor):
        return local
    return ShardedTensor(local, tensor.axis, tensor.placement, is_weight=tensor.is_weight)
