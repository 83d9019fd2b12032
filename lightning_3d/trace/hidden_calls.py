"""Calls in glue that torch's function modes do not see: custom autograd functions and activation checkpoints.

While a step runs, the generator behind non-reentrant checkpoints is replaced by one that only says that it is on. A
checkpoint around glue can't recompute glue, whose tensors may be on another stage; instead each block called inside of
it is checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_3d.torch_internals.autograd import checkpoints_replaced, custom_functions_seen, is_reentrant

Call = Callable[..., Any]


class HiddenCalls(Protocol):
    """A running step that answers calls which function modes do not see."""

    def is_in_glue(self) -> bool:
        """Whether the present code is glue, seen by the step."""

    def on_hidden_function(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a custom autograd function."""

    def checkpointed(self) -> AbstractContextManager[None]:
        """Run glue with checkpointed blocks."""


@contextmanager
def hidden_calls_seen(step: HiddenCalls) -> Iterator[None]:
    """Show custom autograd functions and checkpoints in glue to ``step``."""

    def answer(cls: type[torch.autograd.Function], call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not step.is_in_glue():
            return call(*args, **kwargs)
        if is_reentrant(cls):
            function, _, *arguments = args
            # As it does itself: without a tensor argument that requires grad there is no backward.
            requires_grad = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in arguments)
            with step.checkpointed(), torch.set_grad_enabled(torch.is_grad_enabled() and requires_grad):
                return function(*arguments)
        return step.on_hidden_function(cls.__name__, call, args, kwargs)

    def replace(present: Call) -> Call:
        def generator(*args: Any, **kwargs: Any) -> Iterator[None]:
            if not step.is_in_glue():
                yield from present(*args, **kwargs)
            else:
                with step.checkpointed():
                    yield

        return generator

    with checkpoints_replaced(replace), custom_functions_seen(answer):
        yield
