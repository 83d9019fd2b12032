"""Compiling a function by ``torch.compile``: the one file that knows Dynamo's own names. torch 2.13.

It takes seconds to import, which runs that compile nothing need not wait for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from lightning_3d.torch_internals.backends import compile_graph
from lightning_3d.torch_internals.dispatch import OpOverload

Function = Callable[..., Any]

_Stage = Callable[[], AbstractContextManager[None]]


def compiled(
    function: Function,
    *,
    backend: str,
    mode: str,
    compiling: _Stage,
    is_kept: Callable[[OpOverload], bool] | None = None,
) -> Function:
    """Compile a function as one piece when calls of a new kind come; what it raises then is a `compiler_errors`.

    Random numbers of what is compiled are those of eager code. The backward is compiled with the forward, so that it
    fails there; it may run several times. Other compiled forms of the same code do not count for ``recompile_limit``.

    Args:
        function: A module may be among its arguments.
        backend: "inductor" or another for which a mode is not set.
        mode: One of inductor's.
        compiling: Entered while the backend compiles.
        is_kept: As for `compile_graph`.
    """

    def compiler(graph: nn.Module, inputs: list[Any]) -> Function:
        settings = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        with compiling(), settings:
            made: Function = compile_graph(graph, inputs, backend, mode, is_kept)
        return made

    # Their overloads do not tell of ``isolate_recompiles``, though the function takes it.
    made: Function = torch.compile(function, fullgraph=True, backend=compiler, isolate_recompiles=True)  # type: ignore[call-overload]
    return made


def compiler_errors() -> tuple[type[Exception], ...]:
    """Raised before any of a function's code has run, so that it can run eagerly."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return TorchDynamoException, FailOnRecompileLimitHit


def is_limit(error: Exception) -> bool:
    """Whether a function was compiled ``torch._dynamo.config.recompile_limit`` times, and needs one form more."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def modules_watched() -> AbstractContextManager[None]:
    """Inside, compiled code sees hooks that are added later, and is not made anew for each integer of a module."""
    import torch._dynamo

    settings = {"skip_nnmodule_hook_guards": False, "allow_unspec_int_on_nn_module": True}
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(settings)
    return patched
