"""The settings of tensor parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from lightning_3d.config.checks import check_values
from lightning_3d.config.values import AtLeast
from lightning_3d.errors import ConfigError

TENSOR_STYLES = ("column", "row", "replicate", "vocabulary")
"""The styles that a rule of ``tensor.plan`` can give a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorConfig:
    """How tensor-parallel plans are made and accepted."""

    section: ClassVar[str] = "tensor"

    plan: tuple[tuple[str, str], ...] = ()
    """Rules in place of what planning would find: pairs of an FQN pattern (``"blocks.*.attention.out"``; ``*`` and
    ``?`` as in a shell) and a style: ``"column"``, ``"row"``, ``"replicate"`` or ``"vocabulary"``. Of several rules
    that name a weight the last one holds. Without tensor parallel there is nothing to plan."""

    sequence_parallel: bool = False
    """Let norms, dropout and residuals between a block's sharded weights work on slices of the sequence, which takes
    1 / tensor_parallel_size of the memory for their activations (Korthikanti et al. 2022). For blocks whose first
    argument is (B, T, D) with a token per rank or more; slices need not be equal."""

    verify: bool = True
    """Compare every distinct planned block with its dense self before training, and drop the plans that differ."""

    verify_tolerance: Annotated[float, AtLeast(0)] | Literal["auto"] = "auto"
    """Largest difference that the comparison allows, relative to the largest dense value; ``"auto"`` is the square root
    of the weights' machine epsilon (3e-4 in fp32). Reordered fp32 sums differ by about 1e-6, wrong plans by about 1."""

    def __post_init__(self) -> None:
        check_values(self)
        _check_rules(self.plan)


def _check_rules(rules: tuple[tuple[str, str], ...]) -> None:
    """Refuse a rule of ``tensor.plan`` that is no pair of a pattern and a style."""
    for rule in rules:
        if len(rule) != 2:
            raise ConfigError(f"tensor.plan has the rule {list(rule)}: use pairs of an FQN pattern and a style")
        if rule[1] not in TENSOR_STYLES:
            raise ConfigError(
                f"tensor.plan gives {rule[0]!r} the style {rule[1]!r}: use {', '.join(map(repr, TENSOR_STYLES))}"
            )
