"""The command ``lightning-3d``: one file per group of subcommands."""

from __future__ import annotations

from lightning_3d.cli.main import main

__all__ = ["main"]
