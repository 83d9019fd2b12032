"""The command ``lightning-3d``."""

from __future__ import annotations

from lightning_3d.cli.main import main

__all__ = ["main"]
