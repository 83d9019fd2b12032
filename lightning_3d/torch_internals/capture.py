"""Compiling a function of tensors by one of torch's backends: the one file that calls them without Dynamo.

Dynamo does not follow the modes that run a block on shards. The backends behind it take any function that AOTAutograd
can trace: it runs on fake tensors, modes included, and what is left is a graph of plain tensor operations and
collectives, forward and backward. torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy

from lightning_3d.torch_internals.autocast import autocast_cache
from lightning_3d.torch_internals.backends import compile_graph
from lightning_3d.torch_internals.dispatch import IsKept, OperatorMode, OpOverload, draws_random_numbers
from lightning_3d.torch_internals.fake_tensors import DataDependentOutputException, FakeTensorMode, FunctionalTensor

Computation = Callable[..., Sequence[Tensor]]
"""A function of tensors alone."""


class NotCompilable(Exception):
    """Why a block runs eagerly."""


def capture(
    computation: Computation,
    tensors: Sequence[Tensor],
    backend: str,
    mode: str = "default",
    is_kept: IsKept | None = None,
) -> Computation:
    """Trace a function and compile its forward and backward, without running it.

    Args:
        computation: Must have no effect but its results and in-place changes of its arguments.
        tensors: Examples of its arguments. What is compiled holds for others of the same shapes, strides, dtypes,
            devices, ``requires_grad`` and identities, under the same modes of autograd and autocast.
        backend: As for ``torch.compile``.
        mode: One of inductor's.
        is_kept: As for `compile_graph`.

    Raises:
        NotCompilable: the function reads values or other tensors, communicates in place,
            changes parameters, or draws random numbers.
        Exception: whatever else it raises on tensors without values, or the compiler.
    """
    module = _AsModule(computation, [isinstance(tensor, nn.Parameter) for tensor in tensors])
    settings = torch._functorch.config.patch(enable_autograd_cache=False)  # its key is of a graph of Dynamo's
    # A mode that refuses tensors which are no arguments: they would become constants, and get no gradients.
    stand_ins = TracingContext(FakeTensorMode())
    # Casts of stand-ins must not be handed to later calls.
    with autocast_cache(enabled=False), settings, tracing(stand_ins), _known_failures():
        compiled: Computation = compile_graph(module, tensors, backend, mode, is_kept)
    del module.computation  # what is compiled refers to the module
    return compiled


def is_captured(tensor: Tensor) -> bool:
    """Whether a tensor is a stand-in in a capture."""
    return isinstance(tensor, FunctionalTensor)


@contextmanager
def recomputed_when_compiled() -> Iterator[None]:
    """In a capture, let the compiled backward compute again what is computed inside, rather than keep it."""
    with traceback.preserve_node_meta():
        traceback.current_meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        yield


class _AsModule(nn.Module):
    """AOTAutograd takes modules."""

    def __init__(self, computation: Computation, are_parameters: Sequence[bool]) -> None:
        super().__init__()
        self.computation, self._are_parameters = computation, are_parameters

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        from torch._functorch._aot_autograd.functional_utils import has_data_mutation  # takes long

        with _Refusing():
            results = tuple(self.computation(*tensors))
        for tensor, is_parameter in zip(tensors, self._are_parameters, strict=True):
            if is_parameter and is_captured(tensor) and has_data_mutation(tensor):
                raise NotCompilable("its forward changes its parameters")
        return results


class _Refusing(OperatorMode):
    """Refuses what tracing would lose, the operators behind ``torch.distributed.all_reduce`` and the like; and random
    numbers, of which eager code on shards draws those of one process.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            raise NotCompilable(f"it communicates in place, by {func}")
        if draws_random_numbers(func, args, kwargs):
            raise NotCompilable(f"it draws random numbers on shards, by {func}")
        return func(*args, **kwargs)


@contextmanager
def _known_failures() -> Iterator[None]:
    """In words of the block what torch says in its own."""
    try:
        yield
    except DataDependentOutputException as error:
        raise NotCompilable(f"its Python code reads the value of a tensor, by {error.func}") from error
    except AssertionError as error:
        if "convert all Tensors to FakeTensors" not in str(error):
            raise
        raise NotCompilable("it reads a tensor that neither its arguments nor its modules hold") from error
