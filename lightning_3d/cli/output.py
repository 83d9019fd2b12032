"""How commands print."""

from __future__ import annotations

import sys

from rich.console import Console, RenderableType


def show(result: RenderableType) -> None:
    """Print text as it is, and the rest as rich draws it, as wide as the terminal or 120 columns."""
    if isinstance(result, str):
        print(result)
    else:
        Console(width=None if sys.stdout.isatty() else 120, markup=False).print(result)
