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
_CHUNK = 2**18  # elements that are compared at a time, so that copies in float64 stay small


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
    """The number that, times the gradients of a part's loss, gives those of the whole's; None if there is none.

    Each tensor counts by its own greatest value: an auxiliary loss may be a thousandth of another.
    """
    pairs = list(zip(of_whole, of_part, strict=True))
    if any((whole is None) != (part is None) for whole, part in pairs):
        return None
    products = squares = 0.0
    scales: list[float] = []  # of each tensor of the whole
    scale_of_part = 0.0
    for pair in pairs:
        scale = 0.0
        for expected, given in _chunks(pair):
            scale = _maximum(scale, expected.abs().max().item())
            scale_of_part = _maximum(scale_of_part, given.abs().max().item())
            products, squares = products + (expected @ given).item(), squares + (given @ given).item()
        scales.append(scale)
    if not all(map(math.isfinite, scales)):
        return None
    if not any(scales):
        return 0.0  # whatever the part gives: none of its labels is valid
    if not math.isfinite(scale_of_part) or not squares:
        return None
    factor, least = products / squares, _LEAST_SCALE * max(scales)
    for pair, scale in zip(pairs, scales, strict=True):
        limit = rtol * max(scale, least)
        if any((factor * given - expected).abs().max() > limit for expected, given in _chunks(pair)):
            return None
    return factor


def _maximum(first: float, second: float) -> float:
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


def _chunks(pair: tuple[Tensor | None, Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of two tensors in float64, flat."""
    pieces = [as_reals(tensor.detach()).flatten().split(_CHUNK) for tensor in pair if tensor is not None]
    for expected, given in zip(*pieces, strict=True):
        if expected.numel():
            yield expected.double(), given.double()


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
