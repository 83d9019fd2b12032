"""Blocks that are here in full, compiled one by one by ``torch.compile``.

Blocks with the same code and the same layers share what is compiled. A kind of call that can't be compiled as one piece
is known before any of its code has run, so the block runs eagerly instead.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.block_runner import Call, Dense, running
from lightning_3d.model.eager_blocks import EagerWarnings
from lightning_3d.model.norm_forward import is_watched
from lightning_3d.model.pytrees import with_replaced_leaves
from lightning_3d.torch_internals.capture import recompile_limit
from lightning_3d.torch_internals.dispatch import OpOverload
from lightning_3d.torch_internals.dynamo import compiled, compiler_errors, is_limit
from lightning_3d.torch_internals.modules import RunningNorm, children_of
from lightning_3d.waits import Wait, not_told
from lightning_3d.zero.gathering import wait_for


class DenseCompiler:
    """Compiles the blocks of one model.

    Args:
        is_kept: Tells operators whose results are kept in blocks that are recomputed selectively.
        wait: Told of each kind of call that is compiled.
        whole: Applied to each leaf of their arguments: makes tensors of subclasses plain that stand for values to come.
        is_telling: Whether this rank warns.
    """

    def __init__(
        self,
        config: CompileConfig,
        is_kept: Callable[[OpOverload], bool],
        wait: Wait = not_told,
        whole: Callable[[Any], Any] = lambda leaf: leaf,
        *,
        is_telling: bool = True,
    ) -> None:
        self._config, self._is_kept, self._wait, self._whole = config, is_kept, wait, whole
        self._functions: dict[Hashable, Call] = {}
        self.warnings = EagerWarnings(is_telling=is_telling)

    def of(self, block: nn.Module) -> Dense | None:
        """Runs the forward of a block compiled; None if there is nothing to gain, or if its author compiles it."""
        is_layer = type(block).__module__.startswith("torch.nn.") and not any(children_of(block).values())
        if is_layer or running(block).is_compiled_by_author:
            return None
        return _CompiledForward(block, self)

    def whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments whose tensors have values; lists and dicts stay the same, as the block may change them."""
        args, kwargs = with_replaced_leaves((args, kwargs), self._whole)
        return args, kwargs

    def function(self, block: nn.Module, function: Call, *, is_selective: bool) -> Call:
        """Runs a forward of blocks like this one compiled."""
        key = function, repr(block), is_selective
        if key not in self._functions:
            name, config = type(block).__name__, self._config
            told = partial(self._wait, f"Compiling {name}")
            is_kept = self._is_kept if is_selective else None
            self._functions[key] = compiled(
                function, backend=config.backend, mode=config.mode, compiling=told, is_kept=is_kept
            )
        return self._functions[key]


class _CompiledForward:
    """Runs the forward of one block."""

    def __init__(self, block: nn.Module, compiler: DenseCompiler) -> None:
        self._block, self._compiler = block, compiler
        self._parameters = tuple(block.parameters())
        self._norms = [norm for norm in block.modules() if isinstance(norm, RunningNorm)]
        self._functions: dict[tuple[Call, bool], Call] = {}  # of the author, and whether it is selective -> compiled
        self._is_compilable = True
        self._stance = "default"

    def __call__(self, forward: Call, eagerly: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_compilable or _is_observed() or any(norm.training and is_watched(norm) for norm in self._norms):
            return eagerly(*args, **kwargs)
        args, kwargs = self._compiler.whole(args, kwargs)
        wait_for(self._parameters)  # compiled code reads them beneath torch's functions
        function, owner = (forward.__func__, (forward.__self__,)) if isinstance(forward, MethodType) else (forward, ())
        key = function, running(self._block).recomputed_eagerly is not None
        if key not in self._functions:  # to describe a block takes long
            self._functions[key] = self._compiler.function(self._block, function, is_selective=key[1])
        run = self._functions[key]
        try:
            with torch.compiler.set_stance(self._stance):  # also where code outside of blocks is not compiled
                return run(*owner, *args, **kwargs)
        except compiler_errors() as error:
            self._compiler.warnings.warn(self._block, _reason(error))
            if is_limit(error):
                self._stance = "eager_on_recompile"
            else:
                self._is_compilable = False
        return eagerly(*args, **kwargs)


def _is_observed() -> bool:
    """Whether somebody compiles, exports or traces the code that calls the block."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def _reason(error: Exception) -> str:
    if is_limit(error):
        return f"it was called in more than {recompile_limit()} ways (shapes, values, modes)"
    return str(error).strip() or type(error).__name__
