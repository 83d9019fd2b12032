"""Blocks compiled one by one by ``torch.compile``, each kind of call when it first comes.

    full block       Dynamo follows the forward, the backend compiles its graph
    sharded block    Dynamo follows the same forward on stand-ins of full shapes, `shards` compiles its graph on shards

Blocks with the same code, layers and plan share what is compiled. A kind of call that can't be compiled as one piece is
known before any of its code has run, so the block runs eagerly instead. Guards on what code reads are Dynamo's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from functools import partial
from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.activations.selective import is_costly
from lightning_3d.compile.shards import ShardedGraph, Shards
from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.block_runner import AnyCallable, Compiled, ForwardWrapper, running
from lightning_3d.model.norm_forward import is_watched
from lightning_3d.model.pytrees import with_replaced_leaves
from lightning_3d.tensor.sharded_forward import ShardedForward
from lightning_3d.torch_internals.backends import compile_graph
from lightning_3d.torch_internals.capture import NotCompilable, capture
from lightning_3d.torch_internals.dispatch import IsKept
from lightning_3d.torch_internals.dynamo import NotFollowed, compiled, compiler_errors, is_limit, recompile_limit
from lightning_3d.torch_internals.flex_attention import calls_unseen
from lightning_3d.torch_internals.modules import RunningNorm, children_of
from lightning_3d.torch_internals.pytree import Arguments
from lightning_3d.waits import CountedWait
from lightning_3d.zero.gathering import wait_for

_MAX_REASON = 300
"""Characters of a reason that a warning tells; errors of compilers are long."""


class BlockCompiler:
    """Compiles the blocks of one model.

    Args:
        mesh: The tp axis; None if no block is sharded.
        wait: Counts the kinds of calls that are compiled.
        whole: Applied to each leaf of their arguments: makes tensors of subclasses plain that stand for values to come.
        is_telling: Whether this rank warns.
    """

    def __init__(
        self,
        config: CompileConfig,
        mesh: DeviceMesh | None = None,
        wait: CountedWait | None = None,
        whole: Callable[[object], object] = lambda leaf: leaf,
        *,
        is_telling: bool = True,
    ) -> None:
        self._config, self._mesh, self._wait, self._whole = config, mesh, wait or CountedWait(), whole
        self._is_telling, self._warned = is_telling, set[str]()
        self._functions: dict[Hashable, AnyCallable] = {}

    def of(self, block: nn.Module) -> Compiled | None:
        """Runs the forward of a block compiled; None if there is nothing to gain, or if its author compiles it."""
        runner, shards = running(block), None
        if isinstance(runner.sharded, ShardedForward):
            assert self._mesh is not None
            if runner.sharded.has_vocabulary:
                return None
            shards = Shards(runner.sharded, self._mesh)
        else:
            is_layer = type(block).__module__.startswith("torch.nn.") and not any(children_of(block).values())
            if is_layer or runner.is_compiled_by_author:
                return None
        return _CompiledForward(block, self, shards)

    def whole(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Arguments:
        """Arguments whose tensors have values; lists and dicts stay the same, as the block may change them."""
        args, kwargs = with_replaced_leaves((args, kwargs), self._whole)
        return args, kwargs

    def function(
        self, block: nn.Module, function: AnyCallable, shards: Shards | None, *, is_selective: bool
    ) -> AnyCallable:
        """Runs a forward of blocks like this one compiled."""
        key = function, repr(block), is_selective, None if shards is None else shards.plan
        if key not in self._functions:
            make = compile_graph if shards is None else capture
            compile_it = partial(self._compile, make, type(block).__name__, is_costly if is_selective else None)
            if shards is None:
                self._functions[key] = compiled(function, compile_it)
            else:
                backend = lambda graph, inputs: ShardedGraph(compile_it, graph)  # noqa: E731
                self._functions[key] = compiled(function, backend, dynamic=False)
        return self._functions[key]

    def _compile(
        self, make: AnyCallable, name: str, is_kept: IsKept | None, graph: AnyCallable, inputs: Sequence[object]
    ) -> AnyCallable:
        with self._wait(f"Compiling {name}"):
            made: AnyCallable = make(graph, inputs, self._config.backend, self._config.mode, is_kept)
        return made

    def warn(self, block: nn.Module, reason: str) -> None:
        """Say why a block runs eagerly, once for each class of blocks."""
        name = type(block).__name__
        if name in self._warned or not self._is_telling:
            return
        self._warned.add(name)
        reason = " ".join(reason.split())
        reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
        warnings.warn(f"compile.enabled: {name} runs eagerly, at least in part: {reason}", stacklevel=3)


class _CompiledForward:
    """Runs the forward of one block.

    Args:
        shards: Of a sharded block.
    """

    def __init__(self, block: nn.Module, compiler: BlockCompiler, shards: Shards | None) -> None:
        self._block, self._compiler, self._shards = block, compiler, shards
        self._parameters = tuple(block.parameters())
        self._norms = [norm for norm in block.modules() if isinstance(norm, RunningNorm)]
        self._functions: dict[
            tuple[AnyCallable, bool], AnyCallable
        ] = {}  # of the author, and whether it is selective -> compiled
        self._is_compilable = True
        self._stance = "default"

    def __call__(
        self,
        forward: AnyCallable,
        forward_wrapper: ForwardWrapper | None,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        if not self._is_compilable or _is_observed() or any(norm.training and is_watched(norm) for norm in self._norms):
            raise NotCompilable
        args, kwargs = self._compiler.whole(args, kwargs)
        wait_for(self._parameters)  # compiled code reads them beneath torch's functions
        run: AnyCallable = partial(self._run, forward)
        run = run if forward_wrapper is None else partial(_through, forward_wrapper, run)
        try:
            return run(*args, **kwargs) if self._shards is None else self._shards.run(run, args, kwargs)
        except NotFollowed as error:
            raise NotCompilable from error
        except compiler_errors() as error:
            self._compiler.warn(self._block, _reason(error))
            self._stance = "eager_on_recompile" if is_limit(error) else self._stance
            self._is_compilable = is_limit(error)
            raise NotCompilable from error

    def _run(self, forward: AnyCallable, *args: object, **kwargs: object) -> object:
        function, owner = (forward.__func__, (forward.__self__,)) if isinstance(forward, MethodType) else (forward, ())
        key = function, running(self._block).recomputed_eagerly is not None
        if key not in self._functions:  # to describe a block takes long
            self._functions[key] = self._compiler.function(self._block, function, self._shards, is_selective=key[1])
        # Also where code outside of blocks is not compiled; torch finds itself what FlexAttention captures.
        with torch.compiler.set_stance(self._stance), calls_unseen() if self._shards is None else nullcontext():
            return self._functions[key](*owner, *args, **kwargs)


def _through(forward_wrapper: ForwardWrapper, run: AnyCallable, *args: object, **kwargs: object) -> object:
    return forward_wrapper(run, args, kwargs)


def _is_observed() -> bool:
    """Whether somebody compiles, exports or traces the code that calls the block."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def _reason(error: Exception) -> str:
    if is_limit(error):
        return f"it was called in more than {recompile_limit()} ways (shapes, values, modes)"
    return str(error).strip() or type(error).__name__
