"""Custom autograd functions, which torch's function modes do not see.

Owns a workaround for torch 2.13, in which ``autograd.Function.apply`` bypasses function modes: for a while the base
class of ``Function`` gets an ``apply`` that asks first. ``Function.apply`` itself calls the base class's, so that
references to ``MyFunction.apply`` kept by user code are seen, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import function as autograd_function

Answer = Callable[[type[torch.autograd.Function], Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Answers the application of a custom function: its class, what applies it, its arguments and keyword arguments."""


@contextmanager
def custom_functions_seen(answer: Answer) -> Iterator[None]:
    """Show the autograd functions applied inside to ``answer``; to the innermost one where two are active."""
    base = autograd_function._SingleLevelFunction
    present = vars(base).get("apply")

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return answer(cls, super(base, cls).apply, args, kwargs)  # type: ignore[misc]  # torch._C does not declare it

    base.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if present is None:
            del base.apply  # type: ignore[attr-defined]
        else:
            base.apply = present  # type: ignore[attr-defined]
