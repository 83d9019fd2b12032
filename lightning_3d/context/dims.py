"""Which dimension of what a block gets is the sequence."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_3d.config.context import ContextConfig
from lightning_3d.model.blocks import fqns_matching

_USUAL = 1  # of activations (batch, sequence, features)


class SequenceDims:
    """The dimensions by block: 1 of a first activation with three of them, or as ``context.dims`` says.

    Args:
        fqns: Of the model's blocks.

    Raises:
        PlanError: a rule names no block.
    """

    def __init__(self, config: ContextConfig, fqns: Iterable[str]) -> None:
        self._by_hand: dict[str, int] = {}
        fqns = list(fqns)
        for pattern, dim in config.dims:
            self._by_hand |= dict.fromkeys(fqns_matching(str(pattern), fqns, "context.dims"), int(dim))

    def of(self, fqn: str, num_dims: int) -> int | None:
        """The dimension of the sequence in a floating-point argument of a block; None if it has none."""
        dim = self._by_hand.get(fqn)
        if dim is None:
            return _USUAL if num_dims == _USUAL + 2 else None
        return dim if dim < num_dims else None
