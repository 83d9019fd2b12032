"""Factors between gradients, compared in pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_3d.pipeline import loss_kind
from lightning_3d.pipeline.loss_kind import factor_of

RTOL = 1e-3


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kind, "_CHUNK", 4)


def _gradients() -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 5, generator=generator), None, torch.empty(0), torch.randn(7, generator=generator)]


def _changed(position: int, value: float) -> list[Tensor | None]:
    """The gradients with another number in the last tensor."""
    *others, last = _gradients()
    assert last is not None
    last[position] = value
    return [*others, last]


def test_a_factor_holds_for_all_tensors() -> None:
    part = _gradients()
    whole = [None if tensor is None else 0.25 * tensor for tensor in part]
    assert factor_of(whole, part, RTOL) == pytest.approx(0.25)


@pytest.mark.parametrize("value", [9.0, float("nan"), float("inf")])
@pytest.mark.parametrize("position", range(7))
def test_one_number_that_differs_is_seen(position: int, value: float) -> None:
    assert factor_of(_gradients(), _changed(position, value), RTOL) is None
    assert factor_of(_changed(position, value), _gradients(), RTOL) is None


def test_nothing_is_nothing_of_any_part() -> None:
    nothing = [None if tensor is None else torch.zeros_like(tensor) for tensor in _gradients()]
    for part in (_gradients(), _changed(0, float("nan")), nothing):
        assert factor_of(nothing, part, RTOL) == 0.0
    assert factor_of(_gradients(), nothing, RTOL) is None
    part = _gradients()
    assert factor_of([*part[:-1], None], part, RTOL) is None, "a tensor without a partner"
