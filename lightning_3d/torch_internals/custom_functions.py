"""Seeing the application of custom autograd functions, which bypasses torch's function modes.

References to ``MyFunction.apply`` that user code kept are seen, too. In torch 2.13 ``Function.apply`` is Python and
calls that of its base class, which is replaced. Since 2.14 it is C, which first looks up ``setup_context`` on the
class. Where the class has one, C calls ``_bind_default_args``, and then, inside of a transform of ``torch.func``,
returns what ``_call_custom_function_call`` gives. So every class says that it has one, the first of these computes the
answer and enters a transform, and the second leaves the transform and returns the answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch._C._functorch import _grad_decrement_nesting, _grad_increment_nesting
from torch.autograd import function as autograd_function
from torch.autograd.function import FunctionMeta

from lightning_3d.torch_internals.patches import replaced

FunctionClass = type[torch.autograd.Function]

Answer = Callable[[FunctionClass, Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""Answers the application of a custom function: its class, what applies it, its arguments and keyword arguments."""

_MODULE: Any = autograd_function  # which has other names in other versions
_BASE = _MODULE._SingleLevelFunction
_IS_IN_C = not isinstance(vars(torch.autograd.Function)["apply"], classmethod)


@contextmanager
def custom_functions_seen(answer: Answer) -> Iterator[None]:
    """Show the autograd functions applied inside to ``answer``; what it applies itself, to the one outside of it."""
    outer = _seen[-1]

    def apply(cls: FunctionClass, *args: Any, **kwargs: Any) -> object:
        return answer(cls, partial(outer, cls), args, kwargs)

    _seen.append(apply)
    in_python = {"apply": classmethod(apply)}
    try:
        with _seen_in_c(apply) if _IS_IN_C else replaced("custom functions", _BASE, in_python):
            yield
    finally:
        _seen.pop()


def _apply(cls: FunctionClass, *args: object, **kwargs: object) -> object:
    return super(_BASE, cls).apply(*args, **kwargs)


_seen: list[Callable[..., object]] = [_apply]
"""Run where a function is applied, the innermost last."""


class _Now(local):
    """The application that goes on in a thread, between two calls by C."""

    cls: FunctionClass | None = None
    answers: tuple[object, ...] = ()
    """None or one."""


@contextmanager
def _seen_in_c(apply: Callable[..., object]) -> Iterator[None]:
    now, bind, call = _Now(), _MODULE._bind_default_args, _MODULE._call_custom_function_call

    def attribute(cls: FunctionClass, name: str) -> object:
        if name == "setup_context" and issubclass(cls, torch.autograd.Function):
            now.cls = None if _is_named(name) else cls
            if now.cls is cls:
                return attribute  # any but that of the base class
        return type.__getattribute__(cls, name)

    def bind_and_answer(function: object, args: tuple[object, ...], kwargs: dict[str, object] | None) -> object:
        if now.cls is None:
            return bind(function, args, kwargs)
        cls, now.cls = now.cls, None
        now.answers = (apply(cls, *args, **(kwargs or {})),)
        _grad_increment_nesting()
        return args, kwargs

    def give(cls: FunctionClass, args: tuple[object, ...], kwargs: dict[str, object] | None) -> object:
        if not now.answers:
            return call(cls, args, kwargs)
        _grad_decrement_nesting()
        (given,), now.answers = now.answers, ()
        return given

    helpers = {"_bind_default_args": bind_and_answer, "_call_custom_function_call": give}
    with (
        replaced("custom functions", _MODULE, helpers),
        replaced("custom functions", FunctionMeta, {"__getattribute__": attribute}),
    ):
        yield


def _is_named(name: str) -> bool:
    """Whether the Python code that looks an attribute up names it, or applies the function for us."""
    code = sys._getframe(2).f_code
    return code is _apply.__code__ or name in code.co_names or name in code.co_consts
