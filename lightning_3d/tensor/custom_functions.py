"""Custom autograd functions that a block applies to shards.

Owns a workaround for torch 2.13, in which ``autograd.Function.apply`` bypasses function modes: while a block runs, the
base class of ``Function`` gets an ``apply`` that asks the block's mode. A pipeline stage may have put one there already
(``pipeline/hidden_calls.py``), which comes back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import function as autograd_function

Answer = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Answers a custom function: the function itself, its arguments and keyword arguments."""


_OWN_PACKAGES = ("torch", "lightning_3d")
"""Their functions are how shards are made."""


@contextmanager
def custom_functions_seen(answer: Answer) -> Iterator[None]:
    """Show the custom autograd functions applied inside, but not torch's and this package's, to ``answer``."""
    base = autograd_function._SingleLevelFunction
    present = vars(base).get("apply")

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        function = super(base, cls).apply  # type: ignore[misc]  # torch._C does not declare it
        if cls.__module__.partition(".")[0] in _OWN_PACKAGES:
            return function(*args, **kwargs)
        return answer(function, args, kwargs)

    base.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if present is None:
            del base.apply  # type: ignore[attr-defined]
        else:
            base.apply = present  # type: ignore[attr-defined]
