"""Answering the calls of Python functions, whoever holds them and by whatever name: their code is replaced.

Code that was given ``torch.distributed.all_reduce`` earlier, as by ``from torch.distributed import all_reduce``, does
not see another function put under that name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

Answer = Callable[[str, Callable[..., object], tuple[object, ...], dict[str, object]], object]
"""Answers a call: the module that calls, the function as it was, its arguments and keyword arguments."""


@contextmanager
def calls_answered(functions: Iterable[Callable[..., object]], answer: Answer) -> Iterator[None]:
    """Show the calls of these functions inside to ``answer``; to the innermost one where several are active."""
    before = {function: function.__code__ for function in functions}
    try:
        for function, code in before.items():
            function.__code__ = _calling(partial(_answer, answer, copy_of(function)), code)
        yield
    finally:
        for function, code in before.items():
            function.__code__ = code


def _answer(
    answer: Answer, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    caller = str(sys._getframe(2).f_globals.get("__name__"))  # beyond the code that took the place of the function's
    return answer(caller, original, args, kwargs)


def _template(*args: object, **kwargs: object) -> object:
    call: Any = "what is called"
    return call(args, kwargs)


def _calling(call: Callable[..., object], code: CodeType) -> CodeType:
    """Code that hands its arguments to ``call``, for a function with the closure of ``code``."""
    template = _template.__code__
    constants = tuple(call if constant == "what is called" else constant for constant in template.co_consts)
    return template.replace(co_consts=constants, co_freevars=code.co_freevars, co_name=code.co_name)


def copy_of(function: Callable[..., object]) -> FunctionType:
    """A function of the same code, whatever becomes of the other's."""
    name, defaults, closure = function.__name__, function.__defaults__, function.__closure__
    copy = FunctionType(function.__code__, function.__globals__, name, defaults, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
    if (wrapped := getattr(function, "__wrapped__", None)) is not None:  # whose signature counts
        copy.__wrapped__ = wrapped  # type: ignore[attr-defined]
    return copy
