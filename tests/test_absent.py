"""What lies on other pipeline stages tells its shape, and raises where its values are needed."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.model.absent import mark_absent


def _model() -> nn.Sequential:
    """Two layers and a norm, of which the first and the norm's buffers are absent."""
    model = nn.Sequential(nn.Linear(3, 3, device="meta"), nn.Linear(3, 3), nn.BatchNorm1d(3, device="meta"))
    mark_absent(model)
    return model


Use = Callable[[Tensor, Tensor], Any]

LOST: dict[str, Use] = {
    "add_": lambda absent, present: present.add_(absent),
    "+=": lambda absent, present: present.__iadd__(absent),
    "copy_": lambda absent, present: present.copy_(absent),
    "_foreach_add_": lambda absent, present: torch._foreach_add_([absent, present], [absent, absent]),
    "[]": lambda absent, present: present.__setitem__(0, absent[0]),
    "out": lambda absent, present: torch.add(absent, absent, out=present),
    "linear": lambda absent, present: nn.functional.linear(present, absent),
    "float": lambda absent, present: float(absent.norm()),
    "numpy": lambda absent, present: absent.detach().numpy(),
    "equal": lambda absent, present: torch.equal(absent, absent),
}


@pytest.mark.parametrize("name", LOST)
@torch.no_grad()
def test_functions_that_need_absent_values_raise(name: str) -> None:
    model = _model()
    absent, present = model[0].weight, model[1].weight
    assert isinstance(absent, Tensor)
    assert isinstance(present, Tensor)
    before = present.clone()
    with pytest.raises(StepError, match=r"needs the values of 0.weight, .* inside of `with trainer.strategy.summon"):
        LOST[name](absent, present)
    assert torch.equal(present, before)


CROSSING: dict[str, Use] = {
    "add_": lambda absent, present: absent.mul_(0.5).add_(present, alpha=0.5),
    "data": lambda absent, present: absent.data.add_(present.data),
    "copy_": lambda absent, present: absent.copy_(present.detach()),
    "_foreach_add_": lambda absent, present: torch._foreach_add_([absent], [present]),
    "assigned data": lambda absent, present: setattr(absent, "data", present),
}


@pytest.mark.parametrize("name", CROSSING)
@torch.no_grad()
def test_changes_of_absent_tensors_by_parameters_of_this_stage_raise(name: str) -> None:
    model = _model()
    with pytest.raises(StepError, match=r"changes 0\.weight by a parameter of another pipeline stage than its own"):
        CROSSING[name](model[0].weight, model[1].weight)  # type: ignore[arg-type]


def test_files_hold_tensors_of_torch() -> None:
    model, file = _model(), io.BytesIO()
    torch.save([model.state_dict(), model[0].weight], file)
    file.seek(0)
    state, weight = torch.load(file, weights_only=True)
    assert type(state["0.weight"]) is Tensor
    assert type(weight) is nn.Parameter
    assert weight.is_meta
