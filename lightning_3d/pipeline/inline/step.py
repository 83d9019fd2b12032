"""A step in inline mode: the user's code runs on every rank, and calls of blocks are exchanged.

[Note: what is alike]
Every rank runs the code around the blocks on the whole batch, with the same tensors and random numbers. What a block
leaves besides its output is told to all: what it logs, tensors and plain values that it sets as attributes, lists and
dicts among its arguments that it fills, plain values and lists of tensors in objects among them, and what forward hooks
inside of it see, which the other ranks call after it; those that change an output are called where the block is.

[Note: custom functions]
An autograd function that code around the blocks applies may call blocks, and again in its backward, as reversible
layers do: its backward, too, is code around the blocks. A backward that it starts itself, like any other, is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.model.block_runner import AnyCallable, BlockRunner
from lightning_3d.pipeline.inline.exchange import Exchange, VisibleOutputs, versions_of
from lightning_3d.pipeline.inline.objects import PLAIN, State, changed_state, set_state, state_of
from lightning_3d.pipeline.inline.weights import BlockWeights, has_given_weights
from lightning_3d.torch_internals.autograd import NO_BACKWARD, current_backward
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.interception import Router, SeesCheckpoints, hidden_calls_seen
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


@dataclass(frozen=True, kw_only=True)
class _Left:
    """Results of a call of a block besides its output."""

    side: SideOutputs
    values: Mapping[str, object]
    """Attributes that it set to plain values."""


class InlineStep(SeesCheckpoints):
    """Runs calls of blocks for a step's code.

    Args:
        owner_ranks: FQN of a block -> index on the pp axis of the rank that has it.
    """

    def __init__(
        self, module: LightningModule, router: Router, exchange: Exchange, owner_ranks: Mapping[str, int]
    ) -> None:
        self._module = module
        self._router, self._exchange, self._owner_ranks = router, exchange, owner_ranks
        self.weights = BlockWeights(module, router.blocks, owner_ranks, exchange)
        self._has_functions = False
        self._in_backwards = [NO_BACKWARD]  # in which glue runs, the innermost last: those of custom functions

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run a step inside."""
        with self._answers():
            yield
            self._exchange.lockstep.end_step()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Run a backward inside, of a step or after it."""
        with nullcontext() if self._router.step is self or not self._has_functions else self._answers():
            yield

    @contextmanager
    def _answers(self) -> Iterator[None]:
        self._router.unguard()
        self._router.step, self._in_backwards = self, [NO_BACKWARD]
        try:
            # One thread makes all nodes, also those of gradients of gradients: see [Note: the order of messages].
            one_thread = torch.autograd.set_multithreading_enabled(False)
            with one_thread, hidden_calls_seen(self), self.weights.shown(self.is_in_glue):
                yield
        finally:
            self._router.step = None

    def is_in_glue(self) -> bool:
        """Whether the present code is outside of blocks, and no backward runs it but that of a custom function."""
        return self._router.step is self and not self._is_in_backward()

    def on_hidden_function(
        self, name: str, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Call a custom autograd function: see [Note: custom functions]."""
        args, kwargs = self.weights.with_values((args, kwargs))
        outputs = call(*args, **kwargs)
        nodes = {leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)}
        for node in nodes if torch.is_grad_enabled() else ():
            if node is not None and node.name() == f"{name}Backward":
                self._has_functions = True
                node.register_prehook(self._begin_function)
                node.register_hook(self._end_function)
        return outputs

    def _is_in_backward(self) -> bool:
        """Whether a backward runs, and not that of a custom function."""
        return current_backward() != self._in_backwards[-1]

    def _begin_function(self, gradients: object) -> None:
        self._in_backwards.append(current_backward())

    def _end_function(self, gradients: object, of_outputs: object) -> None:
        self._in_backwards.pop()

    def on_block(
        self, runner: BlockRunner, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Run the call of a block where it is, in a step or between steps."""
        if self._is_in_backward():  # computed again, where it is
            return call(*args, **kwargs)
        fqn, block = runner.fqn, runner.block
        if has_given_weights(block):  # which code around it has made, on all ranks
            with runner.unpatched():
                return block(*args, **kwargs)
        step, self._router.step = self._router.step, None
        try:
            run = partial(self._run, runner, call)
            with self.weights.paused():
                (packed, logs, changed), left = self._exchange.run(fqn, self._owner_ranks[fqn], run, args, kwargs)
            set_state(args, kwargs, changed)
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
        self,
        runner: BlockRunner,
        call: AnyCallable,
        shown: VisibleOutputs,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[tuple[object, list[dict[str, Any]], State], _Left]:
        block, left, noted = runner.block, list[_Left](), list[Noted]()
        before, state = attributes_of(block), state_of(args, kwargs)

        def packed(forward: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            run = lambda args, kwargs: forward(*args, **kwargs)  # noqa: E731
            outputs, side, others = packed_run(block, before, noted, (args, kwargs), run)
            values = {name: get_attribute(block, name) for name in others}
            plain = {name: value for name, value in values.items() if isinstance(value, PLAIN)}
            left.append(_Left(side=side, values=plain))
            return outputs

        logs: list[dict[str, Any]] = []
        changing: set[HookCall] = set()

        def noting(hook: HookCall, original: Hook) -> Hook:
            def run(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> object:
                if self._is_in_backward():  # computed again
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

        def log(name: str, value: object, **settings: object) -> None:
            logs.append({"name": name, "value": shown(value), **settings})

        with (
            replaced("logs", self._module, {"log": log}),
            hooks_replaced(block, frozenset(), noting),
            runner.forward_through(packed),
        ):
            if self.is_checkpointing:
                output = checkpoint(lambda *args: call(*args, **kwargs), *args, use_reentrant=False)
            else:
                output = call(*args, **kwargs)
        return (output, logs, changed_state(state, state_of(args, kwargs))), left[0]
