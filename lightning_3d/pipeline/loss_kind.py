"""How the loss of a batch comes from the losses of its microbatches.

mean        the mean of theirs, by samples
sum         the sum of theirs
weighted    their sum, each times a factor that depends on data, such as its share of the valid labels
whole       none of these: it couples samples of different microbatches
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from lightning_3d.model.reals import as_reals

_TOLERANCE, _HALF_TOLERANCE = 1e-3, 2e-2  # relative, in fp32 and in 16 bits
_LEAST_SCALE = 1e-3  # of a tensor, relative to the greatest: what is smaller may be rounding
_PIECE = 2**18  # elements that are compared at a time, so that copies in float64 stay small


class LossKind(IntEnum):
    """In order: a later kind costs more. One of weights is valid for means, too, and `WHOLE` for all."""

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
    """The number that, times the gradients of a part's loss, gives those of the whole's; None if there is none.

    Each tensor counts by its own greatest value: an auxiliary loss may be a thousandth of another.
    """
    pairs = list(zip(of_whole, of_part, strict=True))
    if any((whole is None) != (part is None) for whole, part in pairs):
        return None
    given = [(whole, part) for whole, part in pairs if whole is not None and part is not None and whole.numel()]
    sums = []  # of each tensor, by piece: greatest value of the whole's, products, squares
    for pair in given:
        sums.append(torch.stack([torch.stack([w.abs().max(), w @ p, p @ p]) for w, p in _pieces(pair)]))
    scales = [float(own[:, 0].max()) for own in sums]
    if not all(map(math.isfinite, scales)):
        return None
    if not any(scales):
        return 0.0  # whatever the part gives: none of its labels is valid
    products, squares = torch.cat(sums)[:, 1:].sum(0).tolist()
    if not math.isfinite(squares) or not squares:
        return None
    factor: float = products / squares
    least = _LEAST_SCALE * max(scales)
    for pair, scale in zip(given, scales, strict=True):
        limit = rtol * max(scale, least)
        if any((factor * part - whole).abs().max() > limit for whole, part in _pieces(pair)):
            return None
    return factor


def _pieces(pair: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Pieces of two tensors in float64, flat."""
    for pieces in zip(*(as_reals(tensor.detach()).flatten().split(_PIECE) for tensor in pair), strict=True):
        yield tuple(piece.double() for piece in pieces)


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
