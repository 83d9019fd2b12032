"""Seeing the calls that a step makes: torch functions in glue, and blocks.

Owns two workarounds: taking one mode off torch's function-mode stack while a block runs (torch 2.13 has only private
calls for that), and swapping a block's class so that its ``__call__`` can be answered without running its hooks, as
FSDP2 swaps classes too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import StepError
from lightning_3d.model.pytrees import Container, argument_containers, set_content
from lightning_3d.torch_internals.modes import pop_function_mode, push_function_mode
from lightning_3d.trace.hidden_calls import hidden_calls_seen
from lightning_3d.trace.side_outputs import changed_containers, guard_attributes

Call = Callable[..., Any]
Finish = Callable[[Call, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a block's forward with its arguments."""

_TENSOR_GETTERS = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag", "grad")
)
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


def reads_meta_only(func: Call) -> bool:
    """Whether ``func`` asks for shape, dtype and the like, which a ghost answers itself."""
    if func in _META_FUNCTIONS:
        return True
    return getattr(func, "__name__", "") == "__get__" and func not in _TENSOR_GETTERS


class StepMode(TorchFunctionMode):
    """A mode that sees every torch function called in glue and every call of a block.

    Inside a block it is off the stack, so blocks run at full speed.
    """

    def __init__(self, router: Router) -> None:
        super().__init__()
        self._router = router
        self._is_answering = False  # inside of a torch function that is being answered
        self._hidden = ExitStack()
        self.is_checkpointing = False
        """Whether the present glue was called by ``torch.utils.checkpoint``."""

    @abstractmethod
    def on_function(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a torch function called in glue."""

    @abstractmethod
    def on_block(self, fqn: str, block: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer the call of a block; ``call`` runs the block itself."""

    def __torch_function__(self, func: Call, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
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

    def on_hidden_function(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a custom autograd function called in glue."""
        with self.paused():
            return self.on_function(_Named(name, call), args, kwargs)

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """Run glue that ``torch.utils.checkpoint`` was called with."""
        before, self.is_checkpointing = self.is_checkpointing, True
        try:
            yield
        finally:
            self.is_checkpointing = before

    def __enter__(self) -> StepMode:
        assert self._router.step is None, "steps don't nest"
        self._router.step = self
        self._hidden.enter_context(hidden_calls_seen(self))
        super().__enter__()  # type: ignore[no-untyped-call]  # torch 2.13
        return self

    def __exit__(self, *exc: Any) -> None:
        self._router.step = None
        self._hidden.close()
        super().__exit__(*exc)  # type: ignore[no-untyped-call]  # torch 2.13

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run a block's own code: neither its functions nor nested calls are seen."""
        above = []
        while (mode := pop_function_mode()) is not self:
            above.append(mode)
        for mode in reversed(above):
            push_function_mode(mode)
        self._router.step = None
        try:
            yield
        finally:
            self._router.step = self
            above = [pop_function_mode() for _ in above]
            push_function_mode(self)
            for mode in reversed(above):
                push_function_mode(mode)


class _Named:
    """A call with the name that it is known by."""

    def __init__(self, name: str, call: Call) -> None:
        self.__name__, self._call = name, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


class Router:
    """Hands the calls of blocks to the step that is being traced or run; without one, blocks run as always."""

    def __init__(self) -> None:
        self.step: StepMode | None = None
        self.absent: frozenset[str] = frozenset()
        """FQNs of the blocks of other stages."""
        self._blocks: dict[str, nn.Module] = {}
        self._guarded: set[tuple[str, str]] = set()

    def install(self, blocks: Mapping[str, nn.Module]) -> None:
        """Route the calls of these blocks (FQN -> module) through this router."""
        for fqn, block in blocks.items():
            block.__class__ = _routed_class(type(block))  # type: ignore[arg-type]  # classes are hashable
            block.__dict__["_router"] = self
            block.__dict__["_block_fqn"] = fqn
        self._blocks.update(blocks)

    def guard(self, attributes: Mapping[str, frozenset[str]]) -> None:
        """Refuse that glue reads these attributes (block FQN -> names in it) of blocks that are absent."""
        for fqn in self.absent.intersection(attributes):
            new = [name for name in sorted(attributes[fqn]) if (fqn, name) not in self._guarded]
            guard_attributes(fqn, self._blocks[fqn], new, lambda: self.step is not None)
            self._guarded.update((fqn, name) for name in new)

    def uninstall(self, blocks: Mapping[str, nn.Module]) -> None:
        """Undo ``install``."""
        for block in blocks.values():
            block.__class__ = type(block).__bases__[1]  # see _routed_class
            del block.__dict__["_router"], block.__dict__["_block_fqn"]

    def check_present(self, fqn: str) -> None:
        """Refuse the call of a block of another stage outside of a step."""
        if fqn in self.absent:
            raise StepError(
                f"{fqn} was called outside of a step, but it lives on another pipeline stage. Only training_step,"
                " validation_step, test_step and predict_step run on all stages: move the call there, or use"
                " pipeline_parallel_size=1."
            )


def own_forward(block: nn.Module) -> Call:
    """The block's forward as its author wrote it, past the routing and past whatever wraps the instance."""
    for cls in type(block).__mro__:
        if cls is not _Routed and not issubclass(cls, _Routed) and "forward" in cls.__dict__:
            return cls.__dict__["forward"].__get__(block)  # type: ignore[no-any-return]
    raise AssertionError(f"{type(block).__name__} has no forward")


class _Routed(nn.Module):
    """Goes in front of a block's class."""

    _router: Router
    _block_fqn: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__
        step = self._router.step
        if step is not None:
            return step.on_block(self._block_fqn, self, call, args, kwargs)
        self._router.check_present(self._block_fqn)
        containers = argument_containers(args, kwargs)
        if not containers:
            return call(*args, **kwargs)
        changed: dict[int, Container] = {}  # what forward changed in copies that FSDP2's hooks made
        self.__dict__["_finish"] = _containers_into(changed)
        output = call(*args, **kwargs)
        for i, content in changed.items():
            set_content(containers[i], content)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        step = self._router.step  # set only if glue calls `block.forward(...)` directly
        if step is not None:
            return step.on_block(self._block_fqn, self, self._forward_finished, args, kwargs)
        return self._forward_finished(*args, **kwargs)

    def _forward_finished(self, *args: Any, **kwargs: Any) -> Any:
        forward, finish = super().forward, take_finish(self)
        return forward(*args, **kwargs) if finish is None else finish(forward, args, kwargs)


def set_finish(block: nn.Module, finish: Finish) -> None:
    """Let ``finish`` run the next forward of a routed block, inside of its hooks.

    What it returns instead of the output is seen by FSDP2's hooks, so that gradients of all tensors in it find the
    parameters gathered; and its arguments are those that forward gets, of which these hooks copy lists and dicts.
    """
    block.__dict__["_finish"] = finish


def take_finish(block: nn.Module) -> Finish | None:
    """What `set_finish` left for the next forward, which is then no longer there."""
    finish: Finish | None = block.__dict__.pop("_finish", None)
    return finish


def is_answered(block: nn.Module) -> bool:
    """Whether a step answers the present call of a block's forward."""
    return isinstance(block, _Routed) and block._router.step is not None


def _containers_into(changed: dict[int, Container]) -> Finish:
    def finish(forward: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        containers = argument_containers(args, kwargs)
        before = [container.copy() for container in containers]
        output = forward(*args, **kwargs)
        changed.update({i: containers[i] for i in changed_containers(containers, before)})
        return output

    return finish


def is_routed(module: nn.Module) -> bool:
    """Whether the module is a block of a model that a strategy has taken."""
    return isinstance(module, _Routed)


@cache
def _routed_class(cls: type[nn.Module]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    routed: type[nn.Module] = type(cls)(cls.__name__, (_Routed, cls), names)  # type: ignore[misc]  # the metaclass
    return routed
