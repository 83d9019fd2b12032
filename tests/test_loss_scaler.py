"""The loss scale after every step, against what DeepSpeed's DynamicLossScaler (0.9.5) does with the same overflows."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_3d import ConfigError, PrecisionConfig
from lightning_3d.precision.loss_scaler import LossScaler

# Overflows (x) and other steps (.), settings, and the scale after each, computed by DeepSpeed's class itself.
TABLE: list[tuple[str, dict[str, Any], list[float]]] = [
    (
        "xx..xx......xx",
        {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 2},
        [256, 128, 128, 128, 64, 32, 32, 32, 32, 64, 64, 64, 64, 32],
    ),
    (
        "x.x.x....x.x.x",
        {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 3},
        [256, 256, 256, 256, 128, 128, 128, 128, 256, 256, 256, 256, 256, 128],
    ),
    (
        "x.x.x....x.x.x",
        {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 3, "consecutive_hysteresis": True},
        [256, 256, 256, 256, 256, 256, 256, 256, 512, 512, 512, 512, 512, 512],
    ),
    ("xxx.x", {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1}, [128, 64, 32, 32, 16]),
    (
        "......x......",
        {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2},
        [16, 16, 32, 32, 32, 64, 64, 64, 64, 128, 128, 128, 256],
    ),
    ("xxx", {"initial_scale_power": 2, "hysteresis": 2, "min_loss_scale": 1}, [4, 2, 1]),
    ("x", {"initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 12}, [12]),
    ("xxx.....", {"loss_scale": 128}, 8 * [128.0]),
]
SPENT = {"xxx", "x"}
"""Where DeepSpeed ends the run."""


def _scales(scaler: LossScaler, steps: str) -> list[float]:
    scales = []
    for step in steps:
        assert not scaler.is_spent
        scaler.update(has_overflowed=step == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(("steps", "settings", "expected"), TABLE)
def test_scale_moves_as_deepspeeds_and_goes_on_from_a_state(
    steps: str, settings: dict[str, Any], expected: list[float]
) -> None:
    whole = LossScaler(PrecisionConfig(**settings))
    assert _scales(whole, steps) == expected
    assert whole.is_spent == (steps in SPENT)
    for stop in range(1, len(steps)):
        first, second = LossScaler(PrecisionConfig(**settings)), LossScaler(PrecisionConfig(**settings))
        _scales(first, steps[:stop])
        second.load_state_dict(first.state_dict())
        assert _scales(second, steps[stop:]) == expected[stop:]


NOTHING = "would do nothing"


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        ({"hysteresis": 4}, "bf16-mixed", f"precision.hysteresis=4 {NOTHING}: precision='bf16-mixed' needs no"),
        ({"loss_scale": 64}, "32-true", f"precision.loss_scale=64 {NOTHING}"),
        ({"keep_fp32": ["head"]}, "32-true", "precision='32-true' has no 16-bit numbers"),
        ({"updates": "direct"}, "16-mixed", f"precision.updates='direct' {NOTHING}: precision='16-mixed' has no"),
        ({"updates": "direct"}, "16-true", "small updates of fp16 weights would be lost"),
        ({"loss_scale": 64, "hysteresis": 4}, None, f"precision.hysteresis=4 {NOTHING}: precision.loss_scale=64"),
        ({"loss_scale": 0}, None, "precision.loss_scale=0 is not allowed"),
        ({"initial_scale_power": 2, "min_loss_scale": 8}, None, "precision.min_loss_scale=8 is more than the first"),
        ({"initial_scale_power": 128}, None, "precision.initial_scale_power=128 makes every loss infinite"),
        ({"loss_scale": 1e39}, None, r"precision.loss_scale=1e\+39 makes every loss infinite"),
        ({"min_loss_scale": 0}, None, "precision.min_loss_scale=0.* would let the scale become 0"),
        ({"hysteresis": 0}, None, "precision.hysteresis=0 is not allowed"),
        ({"updates": "masters"}, None, "nearest: 'master'"),
    ],
)
def test_settings_that_are_not_used_or_contradict_each_other_are_refused(
    settings: dict[str, Any], precision: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionConfig(**settings).check_for(precision)
