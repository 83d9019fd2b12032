"""Warnings of blocks that were to be compiled and run eagerly."""

from __future__ import annotations

import warnings

from torch import nn

_MAX_REASON = 300
"""Characters of a reason that a warning tells; errors of compilers are long."""


class EagerWarnings:
    """Warns once for each class of blocks.

    Args:
        is_telling: Whether this rank warns.
    """

    def __init__(self, *, is_telling: bool) -> None:
        self._is_telling = is_telling
        self._warned: set[str] = set()

    def warn(self, block: nn.Module, reason: str) -> None:
        """Say why a block runs eagerly."""
        name = type(block).__name__
        if name in self._warned or not self._is_telling:
            return
        self._warned.add(name)
        reason = " ".join(reason.split())
        reason = reason if len(reason) <= _MAX_REASON else f"{reason[:_MAX_REASON]} ..."
        warnings.warn(f"compile.enabled: {name} runs eagerly, at least in part: {reason}", stacklevel=3)
