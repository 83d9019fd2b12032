"""Which dimension of what a block gets is the sequence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from fnmatch import fnmatchcase

from lightning_3d.config.context import ContextConfig
from lightning_3d.errors import PlanError

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
            named = [fqn for fqn in fqns if fnmatchcase(fqn, str(pattern))]
            if not named:
                near = difflib.get_close_matches(str(pattern), fqns, n=1, cutoff=0)
                raise PlanError(
                    f"context.dims has the pattern {pattern!r}, which matches no block."
                    + "".join(f" The nearest block is {fqn!r}." for fqn in near)
                )
            self._by_hand |= dict.fromkeys(named, int(dim))

    def of(self, fqn: str, num_dims: int) -> int | None:
        """The dimension of the sequence in a floating-point argument of a block; None if it has none."""
        dim = self._by_hand.get(fqn)
        if dim is None:
            return _USUAL if num_dims == _USUAL + 2 else None
        return dim if dim < num_dims else None
