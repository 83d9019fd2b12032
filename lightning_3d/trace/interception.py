"""Seeing the calls that a step makes: torch functions in glue, and blocks.

A block's own code is not seen: while it runs, the mode is off torch's stack of function modes.

Function modes see neither custom autograd functions nor activation checkpoints. While a step runs, the generator behind
non-reentrant checkpoints is replaced by one that only says that it is on. A checkpoint around glue can't recompute
glue, whose tensors may be on another stage; instead each block called inside of it is checkpointed.

``torch.distributions`` do not check the values of their arguments meanwhile: ghosts have none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.model.block_runner import AnyCallable, BlockRunner, Compiled, Step, running
from lightning_3d.torch_internals.autograd import checkpoints_replaced, is_reentrant
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.dispatch import function_modes, without_function_mode
from lightning_3d.torch_internals.distributions import arguments_unchecked
from lightning_3d.torch_internals.pytree import Args, Kwargs
from lightning_3d.trace.attributes import AttributeGuards

_TENSOR_GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag", "grad")
)
DEVICE_GETTERS = frozenset(
    {*(getattr(Tensor, name).__get__ for name in ("device", "is_cpu", "is_cuda")), Tensor.get_device}
)
"""Where a tensor is."""

_META_FUNCTIONS = frozenset(
    {
        Tensor.size,
        Tensor.dim,
        Tensor.stride,
        Tensor.numel,
        Tensor.nelement,
        Tensor.ndimension,
        Tensor.__len__,
        Tensor.__hash__,
        Tensor.__repr__,
        Tensor.is_contiguous,
        Tensor.element_size,
        Tensor.is_floating_point,
        Tensor.is_complex,
        Tensor.is_signed,
        Tensor.is_inference,
        Tensor.storage_offset,
        Tensor.get_device,
        Tensor.register_hook,
        torch.is_floating_point,
        torch.is_complex,
        torch.is_tensor,
        torch.numel,
    }
)


def reads_meta_only(func: AnyCallable) -> bool:
    """Whether ``func`` asks for shape, dtype and the like, which a ghost answers itself."""
    if func in _META_FUNCTIONS:
        return True
    return getattr(func, "__name__", "") == "__get__" and func not in _TENSOR_GETTERS


class SeesCheckpoints(ABC):
    """A step whose code outside of blocks may use custom autograd functions and checkpoints."""

    is_checkpointing = False
    """Whether the present code was called by ``torch.utils.checkpoint``."""

    @abstractmethod
    def is_in_glue(self) -> bool:
        """Whether the present code is outside of blocks."""

    @abstractmethod
    def on_hidden_function(self, name: str, call: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        """Answer a custom autograd function."""

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Run what ``torch.utils.checkpoint`` was called with."""
        before, self.is_checkpointing = self.is_checkpointing, True
        try:
            yield
        finally:
            self.is_checkpointing = before


class StepMode(SeesCheckpoints, TorchFunctionMode):
    """A mode that sees every torch function called in glue and every call of a block.

    Inside a block it is off the stack, so blocks run at full speed.
    """

    has_replicas: ClassVar[bool] = False
    """Whether the other replicas run the same code now, and so take part in its collectives."""

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router
        self._is_answering = False  # inside of a torch function that is being answered
        self._hidden = ExitStack()

    @abstractmethod
    def on_function(self, func: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        """Answer a torch function called in glue."""

    @abstractmethod
    def on_block(self, runner: BlockRunner, call: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        """Answer the call of a block; ``call`` runs the block itself."""

    def __torch_function__(
        self, func: AnyCallable, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if reads_meta_only(func):
            return func(*args, **kwargs)
        self._is_answering = True
        try:
            return self.on_function(func, args, kwargs)
        finally:
            self._is_answering = False

    def is_in_glue(self) -> bool:
        """Whether the present code is glue rather than a block or a torch function."""
        return self._router.step is self and not self._is_answering

    def on_hidden_function(self, name: str, call: AnyCallable, args: Args, kwargs: Kwargs) -> Any:
        """Answer a custom autograd function called in glue."""

        def named(*args: object, **kwargs: object) -> object:
            return call(*args, **kwargs)

        named.__name__ = name
        with self.paused():
            return self.on_function(named, args, kwargs)

    def on_collective(
        self, name: str, joint: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor], tensor: Tensor
    ) -> Tensor:
        """Answer a collective over the replicas called in glue.

        Args:
            joint: Calls it, with the ranks of the other replicas.
            alone: Answers with a tensor of the same shape, without them.
        """
        answer: Tensor = self.on_hidden_function(name, joint if self.has_replicas else alone, (tensor,), {})
        return answer

    def __enter__(self) -> StepMode:
        assert self._router.step is None, "steps don't nest"
        self._router.step = self
        self._hidden.enter_context(hidden_calls_seen(self))
        self._hidden.enter_context(arguments_unchecked())
        super().__enter__()  # type: ignore[no-untyped-call]  # torch 2.13
        return self

    def __exit__(self, *exc: object) -> None:
        self._router.step = None
        self._hidden.close()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]  # torch 2.13

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a block's own code: neither its functions nor nested calls are seen."""
        with without_function_mode(self):
            self._router.step = None
            try:
                yield
            finally:
                self._router.step = self


def present_step() -> StepMode | None:
    """The mode that sees the present code, if that is glue."""
    modes = (mode for mode in function_modes() if isinstance(mode, StepMode))
    return next((mode for mode in modes if mode.is_in_glue()), None)


@contextmanager
def hidden_calls_seen(step: SeesCheckpoints) -> Iterator[None]:
    """Show custom autograd functions and checkpoints in glue to ``step``."""

    def answer(cls: type[torch.autograd.Function], call: AnyCallable, args: tuple[Any, ...], kwargs: Kwargs) -> object:
        if not step.is_in_glue():
            return call(*args, **kwargs)
        if is_reentrant(cls):
            function, _, *arguments = args
            # As it does itself: without a tensor argument that requires grad there is no backward.
            requires_grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments)
            with step.checkpointed(), torch.set_grad_enabled(torch.is_grad_enabled() and requires_grad):
                return function(*arguments)
        return step.on_hidden_function(cls.__name__, call, args, kwargs)

    def replace(present: AnyCallable) -> AnyCallable:
        def generator(*args: object, **kwargs: object) -> Iterator[None]:
            if not step.is_in_glue():
                yield from present(*args, **kwargs)
            else:
                with step.checkpointed():
                    yield

        return generator

    with checkpoints_replaced(replace), custom_functions_seen(answer):
        yield


class Router:
    """Hands the calls of blocks to the step that is being traced or run.

    Args:
        blocks: FQN -> block.
        absent: FQNs of the blocks of other stages.
        compiled: Gives what runs the forward of a block that is here compiled, if there is such a thing.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        absent: AbstractSet[str] = frozenset(),
        compiled: Callable[[nn.Module], Compiled | None] = lambda block: None,
    ) -> None:
        self.step: Step | None = None
        self.blocks, self.absent, self._compiled = blocks, absent, compiled
        self._guards = AttributeGuards(lambda: self.step is not None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Route the blocks' calls inside; without a step, present blocks run as always."""
        runners = []
        try:
            for fqn, block in self.blocks.items():
                runner = running(block)
                assert runner.route is None, f"{fqn} is routed already"
                runners.append(runner)
                runner.fqn, runner.route, runner.is_absent = fqn, self, fqn in self.absent
                runner.compiled = None if runner.is_absent else self._compiled(block)
            yield
        finally:
            self._guards.remove()
            for runner in runners:
                runner.route = runner.compiled = None
                runner.release()

    def guard(self, attributes: Mapping[str, frozenset[str]]) -> None:
        """Refuse that glue reads these attributes (block FQN -> names in it) of blocks that are absent."""
        for fqn in self.absent & attributes.keys():
            self._guards.add(fqn, self.blocks[fqn], attributes[fqn])

    def unguard(self) -> None:
        """Let glue read all attributes again, as where it is told of those of absent blocks."""
        self._guards.remove()


@contextmanager
def routed(blocks: Mapping[str, nn.Module]) -> Iterator[Router]:
    """Route the calls of these blocks (FQN -> block) inside."""
    router = Router(blocks)
    with router.installed():
        yield router
