"""How the loss of a batch comes from the losses of its microbatches.

mean        the mean of theirs, by samples
sum         the sum of theirs
weighted    their sum, each times a factor that depends on data, such as its share of the valid labels
whole       none of these: it couples samples of different microbatches
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 2e-2  # relative, in fp32 and in 16 bits


class LossKind(IntEnum):
    """See above; each is right where an earlier one is."""

    MEAN = 0
    SUM = 1
    WEIGHTED = 2
    WHOLE = 3


def tolerance(*, is_half: bool) -> float:
    """The relative difference that counts as none."""
    return _HALF_TOLERANCE if is_half else _TOLERANCE


def is_close(found: Tensor, expected: Tensor, rtol: float) -> bool:
    """Whether these differ by little of the greatest value."""
    if not expected.numel():
        return True
    return bool((found - expected).abs().max() <= rtol * expected.abs().max().clamp(min=1e-30))


def factor_of(of_whole: Sequence[Tensor | None], of_part: Sequence[Tensor | None], rtol: float) -> float | None:
    """The number that, times the gradients of a part's loss, gives those of the whole's; None if there is none."""
    pairs = list(zip(of_whole, of_part, strict=True))
    if any((whole is None) != (part is None) for whole, part in pairs):
        return None
    expected, given = (_flat([pair[side] for pair in pairs]) for side in (0, 1))
    if not expected.isfinite().all():
        return None
    if not expected.any():
        return 0.0  # whatever the part gives: none of its labels is valid
    if not given.isfinite().all() or not given.any():
        return None
    factor = (expected @ given / (given @ given)).item()
    return factor if is_close(factor * given, expected, rtol) else None


def _flat(gradients: Sequence[Tensor | None]) -> Tensor:
    present = [gradient.detach().flatten().double() for gradient in gradients if gradient is not None]
    return torch.cat(present) if present else torch.zeros(0)


def kind_of(weights: Sequence[float] | None, shares: Sequence[float], rtol: float) -> LossKind:
    """The kind of a loss whose parts' losses have these weights.

    Args:
        weights: None if there are none.
        shares: The parts' shares of the samples.
    """
    if weights is None:
        return LossKind.WHOLE
    found = torch.tensor(weights)
    if is_close(found, torch.tensor(shares), rtol):
        return LossKind.MEAN
    return LossKind.SUM if is_close(found, torch.ones(len(weights)), rtol) else LossKind.WEIGHTED
