"""A step in inline mode: the user's code runs on every rank, and calls of blocks are exchanged.

[Note: what is alike]
Every rank runs the code around the blocks on the whole batch, with the same tensors and random numbers. What a block
leaves besides its output is told to all: what it logs, tensors and plain values that it sets as attributes, lists and
dicts among its arguments that it fills, and what forward hooks inside of it see, which the other ranks call after it;
those that change an output are called where the block is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.model.block_runner import BlockRunner, Call
from lightning_3d.pipeline.inline.exchange import Exchange, Shown, versions_of
from lightning_3d.pipeline.inline.weights import BlockWeights
from lightning_3d.torch_internals.autograd import is_in_backward
from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.trace.interception import Router, hidden_calls_seen
from lightning_3d.trace.side_outputs import (
    Hook,
    HookCall,
    Noted,
    SideOutputs,
    attributes_of,
    call_hook,
    call_own_hooks,
    get_attribute,
    hooks_replaced,
    packed_run,
    set_attribute,
    unpack_outputs,
)

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, kw_only=True)
class _Left:
    """Results of a call of a block besides its output."""

    side: SideOutputs
    values: Mapping[str, Any]
    """Attributes that it set to plain values."""


class InlineStep:
    """Runs calls of blocks for a step's code.

    Args:
        homes: FQN of a block -> index on the pp axis of the rank that has it.
    """

    def __init__(self, module: LightningModule, router: Router, exchange: Exchange, homes: Mapping[str, int]) -> None:
        self._module = module
        self._router, self._exchange, self._homes = router, exchange, homes
        self.weights = BlockWeights(router.blocks, homes, exchange)
        self._is_checkpointing = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run a step inside."""
        self._router.step = self
        try:
            # One thread makes all nodes, also those of gradients of gradients: see [Note: the order of messages].
            one_thread = torch.autograd.set_multithreading_enabled(False)
            with one_thread, hidden_calls_seen(self), self.weights.shown(self.is_in_glue):
                yield
        finally:
            self._router.step = None

    def is_in_glue(self) -> bool:
        """Whether the present code is outside of blocks, and no backward runs it."""
        return self._router.step is self and not is_in_backward()

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Run code that ``torch.utils.checkpoint`` was called with: of it the blocks alone are computed again."""
        before, self._is_checkpointing = self._is_checkpointing, True
        try:
            yield
        finally:
            self._is_checkpointing = before

    def on_hidden_function(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a custom autograd function."""
        return call(*args, **kwargs)

    def on_block(self, runner: BlockRunner, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the call of a block where it is, in a step or between steps."""
        if is_in_backward():  # computed again, where it is
            return call(*args, **kwargs)
        fqn, block = runner.fqn, runner.block
        step, self._router.step = self._router.step, None
        try:
            run = partial(self._run, runner, call)
            (packed, logs), left = self._exchange.run(fqn, self._homes[fqn], run, args, kwargs)
            output, hook_values = unpack_outputs(block, packed, (args, kwargs), left.side)
            for name, value in left.values.items():
                set_attribute(block, name, value)
        finally:
            self._router.step = step
        for given in logs:
            self._module.log(**given)
        if runner.is_absent:  # else they were called in the block
            for hook, values in zip(left.side.hooks, hook_values, strict=True):
                call_hook(block, hook, values)
        return call_own_hooks(block, args, kwargs, output)

    def _run(
        self, runner: BlockRunner, call: Call, shown: Shown, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, _Left]:
        block, left, noted = runner.block, list[_Left](), list[Noted]()
        before = attributes_of(block)

        def packed(forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            run = lambda args, kwargs: forward(*args, **kwargs)  # noqa: E731
            outputs, side, others = packed_run(block, before, noted, (args, kwargs), run)
            values = {name: get_attribute(block, name) for name in others}
            plain = {name: value for name, value in values.items() if isinstance(value, _PLAIN)}
            left.append(_Left(side=side, values=plain))
            return outputs

        logs: list[dict[str, Any]] = []
        changing: set[HookCall] = set()

        def noting(hook: HookCall, original: Hook) -> Hook:
            def run(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
                if is_in_backward():  # computed again
                    return original(module, args, kwargs, output) if hook in changing else None
                values = shown((args, kwargs, output))
                versions = versions_of(values)
                changed = original(module, *values)
                if changed is None and versions_of(values) == versions:
                    noted.append(Noted(call=hook, values=values))
                    return None  # so that it counts as one that only looks
                changing.add(hook)
                return values[2] if changed is None else changed

            return run

        def log(name: str, value: Any, **settings: Any) -> None:
            logs.append({"name": name, "value": shown(value), **settings})

        with (
            attributes_replaced(self._module, {"log": log}),
            hooks_replaced(block, frozenset(), noting),
            runner.forward_through(packed),
        ):
            if self._is_checkpointing:
                output = checkpoint(lambda *args: call(*args, **kwargs), *args, use_reentrant=False)
            else:
                output = call(*args, **kwargs)
        return (output, logs), left[0]
