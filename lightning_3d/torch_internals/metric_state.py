"""The states of torchmetrics' metrics."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchmetrics import Metric

FIXED_NAMES = frozenset({"_defaults", "_persistent", "_reductions", "process_group"})
"""Attributes of a metric that updates do not change."""


def start_anew(metric: Metric) -> None:
    """Give a metric states of their own, as before its first update; those that it has stay as they are."""
    fresh: dict[str, Any] = {
        name: default.detach().clone() if isinstance(default, Tensor) else []
        for name, default in metric._defaults.items()
    }
    vars(metric).update(fresh, _update_count=0, _computed=None)
