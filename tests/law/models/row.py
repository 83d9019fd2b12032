"""A row of MODELS."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tests.parity import Job, Layout

Family = Literal["pp", "tp", "dp"]

Trait = Literal["batch statistics", "couples samples", "uneven batches", "running statistics", "draws"]
"""batch statistics: BatchNorm, so that pieces of a batch give other numbers. couples samples: the loss is no mean over
samples, so that the mean over replicas is another one, as under DDP. uneven batches: the last batch can't be shared
out evenly among replicas. running statistics: those of BatchNorm, which each replica has its own of. draws: random
numbers in steps, those of one process where every rank runs the whole batch through all of the model."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """A row."""

    job: Job
    lr: float = 0.1
    """For gradient descent with momentum; large enough that weights move measurably, small enough to be no chaos."""
    traits: frozenset[Trait] = frozenset()
    alike: str | None = None
    """Another row that plans and trains alike, and has its cases in the cover instead."""
    warns: tuple[str, ...] = ()
    """Beginnings of warnings that it may give."""
    skips: frozenset[str] = frozenset()
    """Settings and habits that it does not go with."""
    has_plain_step: bool = True
    """Whether its training step takes a batch and a number, and returns the loss, as habits that wrap it have it."""
    runs_inline: bool = False
    """Whether pipelines can't run its steps in microbatches."""
    families: frozenset[Family] = frozenset({"pp", "tp"})
    """Where the cover trains it: in a pipeline, on shards of tensors, by replicas alone."""
    fits: Callable[[Layout], bool] = lambda layout: True
    """Layouts in which it trains; it is refused in others, or not what one process does."""


LOOPS = frozenset({"compiled"})
"""Blocks that loop over positions take minutes to compile."""
IN_HALVES = frozenset({"bf16"})
"""One process can't compute them in bf16 on a CPU, or their gradients drown in rounding."""
ON_SHARDS = frozenset[Family]({"tp"})
"""Families of models whose blocks alone differ from those of another row, which is trained in a pipeline."""
NORMS, COUPLED, UNEVEN = (
    frozenset[Trait]({trait}) for trait in ("batch statistics", "couples samples", "uneven batches")
)
