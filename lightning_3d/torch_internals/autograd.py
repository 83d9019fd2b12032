"""Autograd behind the back of torch's function modes: checkpoints, the recorded graph.

The generator behind non-reentrant activation checkpoints is the one place to step in there; reentrant ones are an
autograd function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch._functorch import eager_transforms
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node
from torch.utils.checkpoint import _checkpoint_hook, _recomputation_hook, _StopRecomputationError

from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.tensors import base_of

Function = Callable[..., object]
Generator = Callable[..., Iterator[None]]
"""Called with the function, then others; the function runs in the forward where it yields."""

_OLD_GENERATOR = "_checkpoint_without_reentrant_generator"
_GENERATOR = next(name for name in (f"{_OLD_GENERATOR}_impl", _OLD_GENERATOR) if name in vars(torch.utils.checkpoint))
"""The name of what ``checkpoint`` calls: the first since torch 2.14, where the second is for others' calls."""

StopRecomputation = _StopRecomputationError
"""Leaves a forward that runs again, on all ranks alike, once it has what the backward needs."""


def refuses_saved_tensor_hooks(error: Exception) -> bool:
    """Whether code failed as `torch.func` differentiates nothing while tensors that are saved have hooks."""
    return "support saved tensor hooks" in str(error)


def checkpoints_replaced(replace: Callable[[Generator], Generator]) -> AbstractContextManager[None]:
    """Make non-reentrant checkpoints inside by ``replace(the present generator)``."""
    new = replace(vars(torch.utils.checkpoint)[_GENERATOR])
    return replaced("checkpoints", torch.utils.checkpoint, {_GENERATOR: new})


def recomputed_by(again: Callable[[Function], Function]) -> AbstractContextManager[None]:
    """Let checkpoints that are made inside recompute ``again(function)`` in place of a function.

    In their backward the modes of the block's forward have long ended; ``again`` starts them anew.
    """

    def replace(present: Generator) -> Generator:
        def generator(function: Function, *args: object, **kwargs: object) -> Iterator[None]:
            yield from present(again(function), *args, **kwargs)

        return generator

    return checkpoints_replaced(replace)


@contextmanager
def checkpoints_noted() -> Iterator[list[Function]]:
    """Collect the functions for which non-reentrant checkpoints are made inside."""
    noted: list[Function] = []

    def note(function: Function) -> Function:
        noted.append(function)
        return function

    with recomputed_by(note):
        yield noted


@contextmanager
def transforms_given(values: Callable[[object], object]) -> Iterator[None]:
    """Let transforms of ``torch.func`` that differentiate take ``values(argument)`` in place of each argument."""
    wrap = eager_transforms._wrap_tensor_for_grad

    def wrapped(argument: object, level: int) -> object:
        return wrap(values(argument), level)

    with replaced("transforms", eager_transforms, {wrap.__name__: wrapped}):
        yield


def is_checkpointing() -> bool:
    """Whether what is computed now is checkpointed, or computed again by a checkpoint: the innermost hooks of saved
    tensors are a checkpoint's.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    of_checkpoints = (_checkpoint_hook.__qualname__, _recomputation_hook.__qualname__)
    return hooks is not None and hooks[0].__qualname__.startswith(of_checkpoints)


def is_reentrant(cls: type[torch.autograd.Function]) -> bool:
    """Whether an autograd function is a checkpoint; its first argument is the function."""
    return cls is torch.utils.checkpoint.CheckpointFunction


def calls_backward_hooks(cls: type[torch.autograd.Function]) -> bool:
    """Whether an autograd function shows gradients to what ``register_full_backward_hook`` of a module got."""
    return cls.__module__.startswith("torch.nn.") and cls.__name__ == "BackwardHookFunction"


def reachable_nodes(outputs: Iterable[Tensor | GradientEdge | None]) -> set[Node]:
    """The nodes that the backward of these outputs runs; an edge or None stands for one that has been released."""
    present = [output for output in outputs if output is not None]
    ends = [output.grad_fn if isinstance(output, Tensor) else output.node for output in present]
    waiting: list[Node] = [node for node in ends if node is not None]
    nodes = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting.append(node)
    return nodes


def function_of(node: Node) -> type[torch.autograd.Function] | None:
    """The autograd function written in Python whose application a node is, if it is one."""
    found: type[torch.autograd.Function] | None = getattr(node, "_forward_cls", None)
    return found


def next_node_number() -> int:
    """The number that the next node of the graph gets that this thread makes; they ascend."""
    return _get_sequence_nr()


def number_of_node(node: Node) -> int:
    """The number of a node, in the order of the thread that made it."""
    return node._sequence_nr()


def has_reentrant_checkpoints(outputs: Iterable[Tensor | GradientEdge | None], since: int = 0) -> bool:
    """Whether the backward of these outputs runs other backwards inside, of reentrant checkpoints.

    Args:
        since: Number of the first node that counts.
    """
    backward = torch.utils.checkpoint.CheckpointFunction._backward_cls
    found = (node for node in reachable_nodes(outputs) if isinstance(node, backward))
    return any(number_of_node(node) >= since for node in found)


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have `call` called once the backward that runs now has ended; to be used in hooks of a backward."""
    Variable._execution_engine.queue_callback(call)


def current_backward() -> int:
    """A number of the backward that this thread runs now, another one in a backward inside of it."""
    return torch._C._current_graph_task_id()


NO_BACKWARD = -1
"""Where none runs."""


def has_saved_tensor_hooks() -> bool:
    """Whether something, such as a checkpoint, sees or counts the tensors that the graph keeps."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def is_cast(tensor: Tensor) -> bool:
    """Whether a tensor was made by a conversion to another dtype, as ``autocast`` converts weights, or device."""
    return tensor.grad_fn is not None and tensor.grad_fn.name().startswith(("ToCopyBackward", "_KeptCopyBackward"))


def is_cast_of_leaf(tensor: Tensor) -> bool:
    """Whether a tensor, or what it is a view of, was made so of one without history that has a gradient.

    Or of all of that one by another name, as the shard is that a block's code finds.
    """
    base = base_of(tensor)
    made = tensor if base is None else base
    if made.grad_fn is None or not is_cast(made):
        return False
    ((source, _),) = made.grad_fn.next_functions
    if source is not None and source.name().startswith(("ViewBackward", "AliasBackward")):
        ((source, _),) = source.next_functions
    return source is not None and source.name().endswith("AccumulateGrad")


def is_in_backward() -> bool:
    """Whether this thread runs a backward now."""
    return current_backward() != NO_BACKWARD
