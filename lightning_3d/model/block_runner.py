"""The one owner of a block's calls: a patch of the block, and the layers around its author's forward in fixed order.

    block(...)           route      a running step answers; a block of another stage refuses to run outside of one
                         defer      an answer without the block's weights, which has the rest run later
                         checkpoint the step runs what is below under a checkpoint, if glue called one
                         hooks      the user's, and those with which FSDP2 gathers parameters
    block.forward(...)   route      as above, as glue may call it directly
                         offload    what the backward needs of what is below lies on the host meanwhile
                         recompute  what is below is computed again in the backward
                         shard      the author's forward on shards
                         pack       the step collects all that the call gives, inside of the hooks
                         compile    code that was compiled for calls of this kind
                         forward    the author's own

Where the compiler chooses what its code keeps, as selective recomputation asks for, recomputation is for the calls that
are not compiled.

The patch is two attributes of the instance, so the class stays the author's, FSDP2 may swap it before or after, and
taking the patch off leaves nothing behind. A block of a model that is here in full loses it with its route. Where
weights are sharded or on another stage, which no end of a run changes, blocks keep what they need.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.distributed.mesh import is_shard
from lightning_3d.errors import StepError
from lightning_3d.model.containers import refill
from lightning_3d.model.pytrees import Container, argument_containers, changed_containers
from lightning_3d.torch_internals.capture import NotCompilable
from lightning_3d.torch_internals.fsdp import is_refusal_of_changes
from lightning_3d.torch_internals.modules import CALL, call_of, is_wrapper_of_compiler, parameters_of
from lightning_3d.torch_internals.profiling import named
from lightning_3d.torch_internals.pytree import Args, Kwargs

_FORWARD = "forward"

SUMMON = "inside of `with trainer.strategy.summon_full_params(module):`"
"""Where a module is whole in every layout."""

AnyCallable = Callable[..., Any]
ForwardWrapper = Callable[[AnyCallable, Args, Kwargs], object]
"""Runs the author's forward with its arguments."""
Compiled = Callable[[AnyCallable, ForwardWrapper | None, Args, Kwargs], object]
"""Runs the author's forward compiled, through what the present call wants around it; raises `NotCompilable` before any
of its code has run where it has to run eagerly."""

Deferred = Callable[[AnyCallable, Args, Kwargs], AnyCallable | None]
"""A call of a block with its hooks, and its arguments -> what answers it now; None if it has to be made."""


class Step(Protocol):
    """A step that is being traced or run."""

    def on_block(
        self, runner: BlockRunner, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """Answer a call of a block that glue made; ``call`` runs the block itself."""


class Route(Protocol):
    """Where the calls of blocks go."""

    @property
    def step(self) -> Step | None:
        """The step whose glue is running."""


class BlockRunner:
    """Runs the calls of one block.

    Args:
        block: Not patched yet; its present forward counts as its author's.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.fqn = ""
        """Its name in the model; empty without a model."""
        self.route: Route | None = None
        self.is_absent = False
        """Whether it lives on another pipeline stage."""
        self.sharded: AnyCallable | None = None
        """Its forward on shards, which ends in ``innermost``."""
        self.compiled: Compiled | None = None
        """Runs its forward compiled, on shards if it is on shards."""
        self.recomputed: Callable[[AnyCallable, Args, Kwargs], object] | None = None
        """Makes calls of it so that the backward computes again what they computed."""
        self.recomputed_eagerly: Callable[[AnyCallable, Args, Kwargs], object] | None = None
        """The same for calls that are not compiled; those that are keep no more than these by themselves."""
        self.offloaded: Callable[[], AbstractContextManager[None]] | None = None
        """Makes the context of a call that moves what its backward needs to the host."""
        self.pipeline_exchange: Callable[[BlockRunner, AnyCallable, Args, Kwargs], object] | None = None
        """Runs calls outside of steps together with other pipeline stages, of which one has the block."""
        self.sliced: Callable[[AnyCallable, Args, Kwargs], object] | None = None
        """Makes calls on what they get, cut along its sequence, where ranks share that."""
        self.sync_check: Callable[[str], None] | None = None
        """Called before its forward where that takes other ranks; raises if they run something else."""
        self.lazy: AnyCallable | None = None
        """Takes the place of the author's forward where that makes logits for a loss."""
        self.deferred: Deferred | None = None
        """Answers calls before their hooks gather weights."""
        self.read: AnyCallable | None = None
        """Makes the values of arguments that are lazy; for calls through code that no function mode sees."""
        self._is_late = False  # a call that was deferred is made
        self._is_recomputed = False  # a call that its author compiled runs, and is computed again as a whole
        self.own_forward: AnyCallable = block.forward
        self._hidden = {name: vars(block)[name] for name in (_FORWARD, CALL) if name in vars(block)}
        self._forward_wrapper: ForwardWrapper | None = None
        functools.update_wrapper(self, block.forward, updated=())
        vars(block).update({_FORWARD: self, CALL: self.call})

    @property
    def is_compiled_by_author(self) -> bool:
        """Whether calls of the block beneath the patch run what ``torch.compile`` made."""
        return self._hidden.get(CALL) is not None or is_wrapper_of_compiler(self.block)

    def release(self) -> None:
        """Take the patch off the block, unless its weights need it."""
        if (
            self.is_absent
            or self.sharded is not None
            or isinstance(self.block, FSDPModule)
            or self.pipeline_exchange is not None
        ):
            return
        if not any(map(is_shard, self.block.parameters())):
            self._take_off()

    @property
    def is_wrapped(self) -> bool:
        """Whether calls of the block go through something else than its class's, as with ``block.compile()``."""
        return CALL in self._hidden or vars(self.block).get(CALL) != self.call

    def _take_off(self) -> None:
        attributes = vars(self.block)
        for name, own in ((_FORWARD, self), (CALL, self.call)):
            if attributes.get(name) == own:  # else somebody has wrapped it since
                del attributes[name]
                attributes.update({name: self._hidden[name]} if name in self._hidden else {})

    def unpatched(self) -> ExitStack:
        """Take the patch off, where all weights of the block are here in full, until the end of what this returns."""
        attributes = vars(self.block)
        before = {name: attributes[name] for name in (_FORWARD, CALL) if name in attributes}
        self._take_off()
        undone = ExitStack()
        undone.callback(attributes.update, before)
        undone.callback(lambda: [attributes.pop(name, None) for name in (_FORWARD, CALL)])
        return undone

    @contextmanager
    def forward_through(self, forward_wrapper: ForwardWrapper) -> Iterator[None]:
        """Let ``forward_wrapper`` run the next author's forward, inside of all hooks.

        What it returns in place of the output is seen by FSDP2's hooks, so that gradients of all tensors in it find the
        parameters gathered; and its arguments are those that forward gets, of which these hooks copy lists and dicts.
        """
        self._forward_wrapper = forward_wrapper
        try:
            yield
        finally:
            self._forward_wrapper = None

    def call(self, *args: object, **kwargs: object) -> object:
        """In place of ``block(...)``."""
        if self.route is not None and (step := self.route.step) is not None:
            return step.on_block(self, self._call_hooked, args, kwargs)
        return self._joined(self._call_alone, args, kwargs)

    def _joined(self, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        is_in_parts = (
            self.pipeline_exchange is not None or self.sharded is not None or isinstance(self.block, FSDPModule)
        )
        if is_in_parts and _is_exporting():
            raise StepError(
                f"{self.fqn} was exported, but the ranks hold parts of the model: export the module on every rank"
                f" {SUMMON}."
            )
        return (
            call(*args, **kwargs)
            if self.pipeline_exchange is None
            else self.pipeline_exchange(self, call, args, kwargs)
        )

    def _call_alone(self, *args: object, **kwargs: object) -> object:
        if not isinstance(self.block, FSDPModule) or self.pipeline_exchange is not None:
            return self._call_hooked(*args, **kwargs)
        self._meet_others()  # before the hooks gather
        if not (containers := argument_containers(args, kwargs)):
            return self._call_hooked(*args, **kwargs)
        changed: dict[int, Container] = {}
        with self.forward_through(functools.partial(_noting_containers, changed)):
            output = self._call_hooked(*args, **kwargs)
        for i, content in changed.items():
            refill(containers[i], content)
        return output

    def _check_present(self) -> None:
        if self.is_absent:
            raise StepError(
                f"{self.fqn} was called in a backward or another block outside of a step, but it lives on another"
                f" pipeline stage: call it on every rank {SUMMON}, or use pipeline_parallel_size=1."
            )
        if self.route is None and any(map(is_shard, self.block.parameters())):
            raise StepError(
                f"{self.fqn} was called outside of a step, but this rank has shards of its weights (zero.stage=3): call"
                f" it on every rank {SUMMON}."
            )
        if not isinstance(self.block, FSDPModule):
            self._meet_others()

    def _meet_others(self) -> None:
        if self.sync_check is not None:
            self.sync_check(f"a call of {self.fqn}")

    def _call_hooked(self, *args: object, **kwargs: object) -> object:
        if isinstance(self.block, FSDPModule):
            self._check_own_weights()
        call = call_of(self.block)
        if CALL in self._hidden:
            call = self._recomputing(self._hidden[CALL])
        if self.is_compiled_by_author and self.read is not None:
            args, kwargs = self.read((args, kwargs))
        call = call if self.deferred is None else self._deferring(call, self.deferred)
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            if not is_refusal_of_changes(error):
                raise
            raise StepError(
                f"{self.fqn} changes an argument in place, which no block does whose weights FSDP2 gathers. Let it"
                " change a clone, or use a zero.stage below 3."
            ) from error

    def _check_own_weights(self) -> None:
        """Refuse tensors in place of parameters: hooks put gathered parameters there before the forward."""
        for name, owner in self.block.named_modules():
            registered: dict[str, object] = dict(parameters_of(owner))
            for own_name, weight in registered.items():
                if weight is not None and not isinstance(weight, nn.Parameter):
                    fqn = ".".join(filter(None, (self.fqn, name, own_name)))
                    raise StepError(
                        f"{fqn} is a {type(weight).__name__} in place of a parameter in a call of {self.fqn}, as"
                        " torch.func.functional_call puts it there, but zero.stage=3 gathers the block's own parameters"
                        " before its forward. Use a zero.stage below 3."
                    )

    def _recomputing(self, compiled: AnyCallable) -> AnyCallable:
        """A call of the block as its author compiled it, in one with what recomputes it, which no compiler follows."""
        recomputed = self.recomputed
        if recomputed is None or self.route is None or self._forward_wrapper is not None:
            return compiled

        def run(*args: object, **kwargs: object) -> object:
            self._is_recomputed = True
            try:
                return compiled(*args, **kwargs)
            finally:
                self._is_recomputed = False

        return lambda *args, **kwargs: recomputed(run, args, kwargs)

    def _deferring(self, call: AnyCallable, deferred: Deferred) -> AnyCallable:
        def answer(*args: object, **kwargs: object) -> object:
            if (answered := deferred(call, args, kwargs)) is None:
                return call(*args, **kwargs)
            forward_wrapper = self._take_forward_wrapper()
            return answered(*args, **kwargs) if forward_wrapper is None else forward_wrapper(answered, args, kwargs)

        return answer

    def call_late(self, call: AnyCallable, forward_wrapper: ForwardWrapper, *args: object) -> Any:
        """Make a call that was deferred, with its hooks; ``forward_wrapper`` runs its forward."""
        self._is_late = True
        try:
            with self.forward_through(forward_wrapper):
                return call(*args)
        finally:
            self._is_late = False

    def __call__(self, *args: object, **kwargs: object) -> object:
        """In place of ``block.forward(...)``."""
        if self._is_late:
            return self._forward(*args, **kwargs)
        if self.route is not None and (step := self.route.step) is not None:
            return step.on_block(self, self._forward, args, kwargs)
        return self._joined(self._forward, args, kwargs)

    def _forward(self, *args: object, **kwargs: object) -> object:
        self._check_present()
        offloaded = nullcontext() if self.offloaded is None or self.route is None else self.offloaded()
        with named(self.fqn), offloaded:
            return self._enable_recompute(*args, **kwargs)

    def _enable_recompute(self, *args: object, **kwargs: object) -> object:
        if self.recomputed is None or self.route is None or self._is_recomputed:
            return self._compute(*args, **kwargs)
        return self.recomputed(self._compute, args, kwargs)

    def _eagerly(self, call: AnyCallable) -> AnyCallable:
        """A call that is not compiled."""
        recomputed = self.recomputed_eagerly
        if recomputed is None or self.route is None:
            return call
        return lambda *args, **kwargs: recomputed(call, args, kwargs)

    def _compute(self, *args: object, **kwargs: object) -> object:
        if self.sliced is None or self._is_late:  # a call that was deferred has slices
            return self._run(*args, **kwargs)
        return self.sliced(self._run, args, kwargs)

    def _run(self, *args: object, **kwargs: object) -> object:
        forward_wrapper = self._take_forward_wrapper()
        if self.compiled is not None:
            try:
                return self.compiled(self._own, forward_wrapper, args, kwargs)
            except NotCompilable:
                pass  # out of this context, which an error would tell of
        self._forward_wrapper = forward_wrapper
        if self.sharded is None:
            return self.innermost(*args, **kwargs)
        return self._eagerly(self.sharded)(*args, **kwargs)

    def innermost(self, *args: object, **kwargs: object) -> object:
        """The author's forward, through what the present call wants around it."""
        forward_wrapper = self._take_forward_wrapper()
        run = self._own if self.sharded is not None else self._eagerly(self._own)
        return run(*args, **kwargs) if forward_wrapper is None else forward_wrapper(run, args, kwargs)

    @property
    def _own(self) -> AnyCallable:
        return self.own_forward if self.lazy is None else self.lazy

    def _take_forward_wrapper(self) -> ForwardWrapper | None:
        forward_wrapper, self._forward_wrapper = self._forward_wrapper, None
        return forward_wrapper

    def __getstate__(self) -> dict[str, object]:
        """A copy of the block runs its layers, but belongs to no step, and what was compiled is the block's own."""
        hidden = {name: value for name, value in self._hidden.items() if name != CALL}  # as a module does
        steps = (
            "route",
            "recomputed",
            "recomputed_eagerly",
            "offloaded",
            "lazy",
            "deferred",
            "sliced",
            "_forward_wrapper",
        )
        own = dict.fromkeys((*steps, "compiled"))
        return {**vars(self), **own, "_hidden": hidden}


def runner_of(module: nn.Module) -> BlockRunner | None:
    """The runner that owns the calls of this module."""
    forward = vars(module).get(_FORWARD)
    return forward if isinstance(forward, BlockRunner) else None


def running(block: nn.Module) -> BlockRunner:
    """The runner that owns the calls of this block, a new one if it has none."""
    return runner_of(block) or BlockRunner(block)


def own_forward(block: nn.Module) -> AnyCallable:
    """The block's forward as its author wrote it, past all layers."""
    runner = runner_of(block)
    return block.forward if runner is None else runner.own_forward


def _noting_containers(
    changed: dict[int, Container], forward: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Run ``forward`` and note what it changed in lists and dicts among its arguments, as FSDP2's hooks copied them."""
    containers = argument_containers(args, kwargs)
    before = [container.copy() for container in containers]
    output = forward(*args, **kwargs)
    changed.update({i: containers[i] for i in changed_containers(containers, before)})
    return output


def _is_exporting() -> bool:
    """Whether ``torch.export`` or TorchScript's trace runs the present code."""
    return torch.compiler.is_exporting() or bool(torch.jit.is_tracing())  # type: ignore[attr-defined,no-untyped-call]


def is_own(module: object) -> bool:
    """Whether a ``__module__`` is of torch or of this package, which run the model, rather than of the model's code."""
    return str(module).partition(".")[0] in ("torch", "lightning_3d")
