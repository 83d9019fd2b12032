"""Compiling a function by ``torch.compile``: the one file that knows Dynamo's own names. torch 2.13.

It takes seconds to import, which runs that compile nothing need not wait for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.fx import GraphModule

from lightning_3d.torch_internals.capture import NotCompilable

Function = Callable[..., object]

Backend = Callable[[GraphModule, list[object]], Function]
"""A graph and examples of its inputs -> what runs in its place."""


class NotFollowed(Exception):
    """A call that Dynamo leaves alone: it may compile no more forms, it is disabled, or a dispatch mode is active."""


def compiled(function: Function, backend: Backend, *, dynamic: bool | None = None) -> Function:
    """Compile a function as one piece when calls of a new kind come.

    Where that fails it raises one of `compiler_errors`, before any of the function's code has run. Other compiled forms
    of the same code do not count for `recompile_limit`.

    Args:
        function: A module may be among its arguments.
        backend: Compiles graphs.
        dynamic: As for ``torch.compile``.

    Raises:
        NotFollowed: by what it returns, in place of running the function eagerly.
    """

    def followed(*args: object, **kwargs: object) -> object:
        if not torch.compiler.is_compiling():
            raise NotFollowed
        return function(*args, **kwargs)

    # Which shapes of a function change is known by its name.
    name = f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"
    followed.__code__ = followed.__code__.replace(co_name=name)
    # Their overloads do not tell of ``isolate_recompiles``, though the function takes it.
    made: Function = torch.compile(  # type: ignore[call-overload]
        followed, fullgraph=True, dynamic=dynamic, backend=backend, isolate_recompiles=True
    )
    return made


def compiler_errors() -> tuple[type[Exception], ...]:
    """Raised before any of a function's code has run, so that it can run eagerly."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return NotCompilable, TorchDynamoException, FailOnRecompileLimitHit, GuardOnDataDependentSymNode


def is_limit(error: Exception) -> bool:
    """Whether a function was compiled `recompile_limit` times, and needs one form more."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    return isinstance(error, FailOnRecompileLimitHit)


def recompile_limit() -> int:
    """How many compiled forms torch keeps of one function."""
    return torch._dynamo.config.recompile_limit


def modules_watched() -> AbstractContextManager[None]:
    """Inside, compiled code sees hooks that are added later, and is not made anew for each integer of a module."""
    import torch._dynamo

    settings = {"skip_nnmodule_hook_guards": False, "allow_unspec_int_on_nn_module": True}
    patched: AbstractContextManager[None] = torch._dynamo.config.patch(settings)
    return patched


def users_compiler() -> Callable[[Function], Function] | None:
    """Compiles functions with the options of the innermost compiled function that is under way; None if none is."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            compiler: Callable[[Function], Function] = frame.f_locals["self"]
            return compiler
        frame = frame.f_back
    return None
