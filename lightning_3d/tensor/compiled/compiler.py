"""Blocks compiled one by one: what a block computes on this rank's shards, captured once for each kind of call.

    a call -> known?  what was compiled for its kind, or eagerly
           -> new:    run it once on copies to see that it only computes, compile it, compare the two

So what can't be compiled is found before anything compiled is used. All ranks of the tp group decide alike, as what is
compiled may leave out collectives that nobody needs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.activations.selective import is_costly
from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.block_runner import Compiled, running
from lightning_3d.model.eager_blocks import EagerWarnings
from lightning_3d.tensor.compiled.call import Call, CompiledCall, compile_call, read_call
from lightning_3d.tensor.compiled.observation import observe
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.torch_internals.capture import NotCompilable, recompile_limit
from lightning_3d.torch_internals.dispatch import OpOverload
from lightning_3d.waits import Wait, not_told

_Key = tuple[Hashable, Hashable, bool]
"""A block, a kind of call of it, and whether it is recomputed selectively."""


class BlockCompiler:
    """Compiles the blocks of one model; blocks that compute the same share what is compiled.

    Args:
        mesh: The tp axis.
        config: By what they are compiled.
        wait: Told of each block that is compiled.
    """

    def __init__(self, mesh: DeviceMesh, config: CompileConfig, wait: Wait = not_told) -> None:
        self._mesh, self._config, self._wait = mesh, config, wait
        self._known: dict[Hashable, CompiledCall | str] = {}  # a string: why calls of this kind run eagerly
        self._warnings = EagerWarnings(is_telling=mesh.get_local_rank() == 0)

    @property
    def num_compiled(self) -> int:
        """Kinds of calls that are compiled so far."""
        return sum(isinstance(known, CompiledCall) for known in self._known.values())

    def compiled(self, block: nn.Module, plan: BlockTensorPlan, run: Callable[..., Any]) -> Compiled:
        """Compiles `run`, the eager forward of a block on shards, for each kind of call when it first comes."""
        block_key, call_keys = (type(block), repr(block), plan), set[Hashable]()

        def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
            try:
                call = read_call(block, args, kwargs)
                key = block_key, call.key, running(block).recomputed_eagerly is not None
                return functools.partial(self._find(block, run, call, key, call_keys), call.tensors)
            except NotCompilable as reason:
                self._warnings.warn(block, str(reason))
                return None

        return find

    def _find(
        self, block: nn.Module, run: Callable[..., Any], call: Call, key: _Key, call_keys: set[Hashable]
    ) -> CompiledCall:
        if key not in call_keys:
            if len(call_keys) >= recompile_limit():
                raise NotCompilable(f"it was called in more than {len(call_keys)} ways (shapes, values, modes)")
            call_keys.add(key)
        if key not in self._known:
            with self._wait(f"Compiling {type(block).__name__}"):
                self._known[key] = self._compile(block, run, call, is_kept=is_costly if key[-1] else None)
        known = self._known[key]
        if isinstance(known, str):
            raise NotCompilable(known)
        return known

    def _compile(
        self,
        block: nn.Module,
        run: Callable[..., Any],
        call: Call,
        *,
        is_kept: Callable[[OpOverload], bool] | None,
    ) -> CompiledCall | str:
        """Compile this kind of call, or say why that can't be; the same on all ranks."""
        made, reason = None, "another rank can't compile it"
        try:
            observed = observe(block, run, call, _device(self._mesh))
            made = compile_call(block, run, call, observed, self._config, is_kept)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of tracing, of the compiler, or of the block itself, which eagerly says so
            reason = str(error) if isinstance(error, NotCompilable) else f"{type(error).__name__}: {error}"
        if not self._all(made is not None):
            return reason
        assert made is not None
        try:
            is_right, reason = made.computes(observed, call), "what was compiled gave other values"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            is_right, reason = False, f"what was compiled raised {type(error).__name__}: {error}"
        return made if self._all(is_right) else reason

    def _all(self, is_true: bool) -> bool:
        agreed = torch.tensor(int(is_true), device=_device(self._mesh))
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=self._mesh.get_group())
        return bool(agreed)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
