"""The parts that this rank steps, dealt to windows of bounded size that are stepped one after the other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False, kw_only=True)
class Part:
    """A parameter that is stepped now, on this rank."""

    parameter: nn.Parameter
    """The module's."""
    values: Tensor
    """The plain part of it that this rank steps."""
    gradient: Tensor
    """Like `values`, in 16 bits or in theirs."""
    rounded: Tensor | None = None
    """The 16-bit part of the parameter, where `values` are its master weights."""


def deal(parts: Iterable[Part], num_bytes: float) -> list[list[Part]]:
    """Deal parts to windows, in their order; at least one window, which may be empty.

    Args:
        num_bytes: Of parameters, which a window exceeds only where one part alone does.
    """
    windows: list[list[Part]] = [[]]
    filled = 0
    for part in parts:
        if windows[-1] and filled + part.values.nbytes > num_bytes:
            windows.append([])
            filled = 0
        windows[-1].append(part)
        filled += part.values.nbytes
    return windows
