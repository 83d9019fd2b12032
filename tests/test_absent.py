"""Parameters of another pipeline stage in code that asks for their type, device and shape alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.model.absent import mark_absent


@pytest.fixture
def weight() -> Tensor:
    """Absent, of 16 bits, (4, 3)."""
    module = nn.Linear(3, 4, device="meta", dtype=torch.bfloat16)
    mark_absent(module)
    return module.weight


def test_tensors_of_the_kind_of_one_elsewhere_are_here(weight: Tensor) -> None:
    noise = torch.ones(2)
    made = [weight.new_zeros(1, 2), weight.new_tensor([1.0]), noise.type_as(weight), noise.to(weight)]
    assert [(type(tensor), tensor.dtype, tensor.device.type) for tensor in made] == [
        (Tensor, torch.bfloat16, "cpu")
    ] * 4
    assert torch.ones(3).expand_as(weight).sum() == 12


def test_values_of_one_elsewhere_are_refused(weight: Tensor) -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    for needs in (lambda: x + weight, lambda: torch.nn.functional.linear(input=x, weight=weight)):
        with pytest.raises(StepError, match="needs the values of weight"):
            needs()
