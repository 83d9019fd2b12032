"""``F.glu`` in calls that tensor parallel understands: the two halves of its input are the parts of one projection."""

from __future__ import annotations

from torch import Tensor


def gated(input: Tensor, dim: int = -1) -> Tensor:
    """The same arguments and result as ``F.glu``."""
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()
