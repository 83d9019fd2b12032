"""The loss scale after every step, against what ``torch.amp.GradScaler`` does with the same overflows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d import ConfigError, PrecisionConfig
from lightning_3d.precision.loss_scaling import LossScale


def _scales_of_torch(steps: str, power: int, window: int) -> tuple[list[float], dict[str, Any]]:
    """The scale after each step, of which those with an x overflow, and the state at the end."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**power, growth_interval=window)
    parameter, scales = nn.Parameter(torch.zeros(1)), []
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in steps:
        parameter.grad = scaler.scale(torch.full((1,), torch.inf if step == "x" else 1.0))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, scaler.state_dict()


def _scales(scale: LossScale, steps: str) -> list[float]:
    scales = []
    for step in steps:
        assert not scale.is_spent
        scale.update(has_overflowed=step == "x")
        scales.append(scale.value)
    return scales


@pytest.mark.parametrize("steps", ["xx..xx......xx", "x.x.x....x.x.x", "xxx.x", "......x......"])
def test_scale_moves_as_torchs_and_goes_on_from_a_state(steps: str) -> None:
    expected, state = _scales_of_torch(steps, 8, 3)
    settings = PrecisionConfig(initial_scale_power=8, loss_scale_window=3)
    whole = LossScale(settings)
    assert _scales(whole, steps) == expected
    assert whole.state_dict() == state
    for stop in range(1, len(steps)):
        second = LossScale(settings)
        second.load_state_dict(_scales_of_torch(steps[:stop], 8, 3)[1])
        assert _scales(second, steps[stop:]) == expected[stop:]


def test_a_fixed_scale_stays_and_the_smallest_is_spent() -> None:
    assert _scales(LossScale(PrecisionConfig(loss_scale=128)), "xxx.....") == 8 * [128.0]
    scale = LossScale(PrecisionConfig(initial_scale_power=2))
    assert _scales(scale, "xx") == [2.0, 1.0]
    assert scale.is_spent


NOTHING = "would do nothing"


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        (
            {"loss_scale_window": 4},
            "bf16-mixed",
            f"window=4 {NOTHING}: precision='bf16-mixed' needs",
        ),
        ({"loss_scale": 64}, "32-true", f"precision.loss_scale=64 {NOTHING}"),
        ({"keep_fp32": ["head"]}, "32-true", "precision='32-true' has no 16-bit numbers"),
        ({"updates": "direct"}, "16-mixed", f"precision.updates='direct' {NOTHING}: precision='16-mixed' has no"),
        ({"updates": "direct"}, "16-true", "small updates of fp16 weights would be lost"),
        ({"loss_scale": 64, "loss_scale_window": 4}, None, f"window=4 {NOTHING}: precision.loss_scale=64"),
        ({"loss_scale": 0}, None, "precision.loss_scale=0 is not allowed"),
        ({"loss_scale_window": 0}, None, "precision.loss_scale_window=0 is not allowed"),
        ({"updates": "masters"}, None, "use 'auto', 'master' or 'direct'"),
    ],
)
def test_settings_that_are_not_used_or_contradict_each_other_are_refused(
    settings: dict[str, Any], precision: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionConfig(**settings).check_for(precision)
