"""How an optimizer steps: a line per optimizer in the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_3d.memory.rank_memory import size_text
from lightning_3d.zero.optimizer_kind import OptimizerKind

KindFound = Literal["known", "tried on small tensors", "set by zero.optimizer_steps"]

_STEPS: dict[OptimizerKind, str] = {
    "elements": "parameters element by element",
    "parameters": "whole parameters",
    "all": "all parameters together",
}


@dataclass(frozen=True, kw_only=True)
class OptimizerPlan:
    """How much of a parameter an optimizer has to see, and what that moves between ranks."""

    name: str
    """Its class."""
    kind: OptimizerKind
    found: KindFound
    """How the kind was found."""
    received_bytes: int
    """Pieces of parameters and gradients that a rank receives for a step, in the mean, besides what ZeRO sends."""

    def __str__(self) -> str:
        moved = f", for which a rank receives {size_text(self.received_bytes)} per step" if self.received_bytes else ""
        return f"{self.name} steps {_STEPS[self.kind]} ({self.found}){moved}"
