"""Compiling a function of tensors by one of torch's backends: the one file that calls them without Dynamo.

Dynamo reads bytecode and does not follow the modes that run a block on shards. The backends behind it take any function
that AOTAutograd can trace: it runs on stand-ins, modes included, and what is left is a graph of plain tensor operations
and collectives, forward and backward. torch 2.13; ``lookup_backend`` is what ``torch.compile(backend=...)`` calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode

Computation = Callable[..., Sequence[Tensor]]
"""A function of tensors alone."""


class _AsModule(nn.Module):
    """AOTAutograd takes modules."""

    def __init__(self, computation: Computation) -> None:
        super().__init__()
        self._computation = computation

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(self._computation(*tensors))


def capture(computation: Computation, tensors: Sequence[Tensor], backend: str) -> Computation:
    """Trace a function and compile its forward and backward, without running it.

    Args:
        computation: Must have no effect but its results and in-place changes of its arguments.
        tensors: Examples of its arguments. What is compiled holds for others of the same shapes, strides, dtypes,
            devices, ``requires_grad`` and identities, under the same modes of autograd and autocast.
        backend: As for ``torch.compile``.

    Raises:
        Exception: whatever the function raises on tensors without values, or the compiler.
    """
    from torch._dynamo import lookup_backend  # takes a second, which runs without compilation need not wait for

    compiler = lookup_backend(backend)
    settings = torch._functorch.config.patch(
        enable_autograd_cache=False,  # its key is of a graph of Dynamo's
        force_non_lazy_backward_lowering=True,  # so that it fails here, not in a backward
        donated_buffer=False,  # or `backward(retain_graph=True)` would raise
    )
    # A mode that refuses tensors which are no arguments: they would become constants, and get no gradients.
    stand_ins = TracingContext(FakeTensorMode())
    with _without_autocast_cache(), settings, tracing(stand_ins):
        # They declare a GraphModule, of which they need no more than a module (torch 2.13).
        compiled: Computation = compiler(_AsModule(computation), list(tensors))  # type: ignore[arg-type]
    return compiled


@contextmanager
def _without_autocast_cache() -> Iterator[None]:
    """Casts of stand-ins must not be handed to later calls."""
    enabled = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)
