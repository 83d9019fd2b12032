"""Telling the code that runs a model, torch's and this package's, from the model's own."""

from __future__ import annotations

_PACKAGES = ("torch", "lightning_3d")


def is_own(module: object) -> bool:
    """Whether a ``__module__`` is part of torch or of this package."""
    return str(module).partition(".")[0] in _PACKAGES
