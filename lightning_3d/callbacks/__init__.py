"""Callbacks for a Trainer with ``strategy="3d"``."""

from __future__ import annotations

from lightning_3d.callbacks.memory import MemoryTable

__all__ = ["MemoryTable"]
