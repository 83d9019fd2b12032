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
    (
        "xxx.x",
        {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
        [128, 64, 32, 32, 16],
    ),
    (
        "......x......",
        {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 2},
        [16, 16, 32, 32, 32, 64, 64, 64, 64, 128, 128, 128, 256],
    ),
]


def _scales(scaler: LossScaler, steps: str) -> list[float]:
    scales = []
    for step in steps:
        scaler.update(has_overflowed=step == "x")
        scales.append(scaler.scale)
    return scales


@pytest.mark.parametrize(("steps", "settings", "expected"), TABLE)
def test_scale_moves_as_deepspeeds(steps: str, settings: dict[str, Any], expected: list[float]) -> None:
    assert _scales(LossScaler(PrecisionConfig(**settings)), steps) == expected


@pytest.mark.parametrize(("steps", "settings", "expected"), TABLE)
@pytest.mark.parametrize("stop", [1, 3, 4])
def test_scale_goes_on_from_a_state(steps: str, settings: dict[str, Any], expected: list[float], stop: int) -> None:
    first, second = LossScaler(PrecisionConfig(**settings)), LossScaler(PrecisionConfig(**settings))
    _scales(first, steps[:stop])
    second.load_state_dict(first.state_dict())
    assert _scales(second, steps[stop:]) == expected[stop:]


def test_scale_is_spent_where_deepspeed_ends_the_run() -> None:
    scaler = LossScaler(PrecisionConfig(initial_scale_power=2, hysteresis=2, min_loss_scale=1))
    for scale in (4.0, 2.0, 1.0):  # after the first, the second and the third overflow
        assert not scaler.is_spent
        scaler.update(has_overflowed=True)
        assert scaler.scale == scale
    assert scaler.is_spent


def test_scale_stops_at_its_minimum() -> None:
    scaler = LossScaler(PrecisionConfig(initial_scale_power=4, hysteresis=1, min_loss_scale=12))
    scaler.update(has_overflowed=True)
    assert scaler.scale == 12.0
    assert scaler.is_spent


def test_fixed_scale_does_not_move() -> None:
    scaler = LossScaler(PrecisionConfig(loss_scale=128))
    assert _scales(scaler, "xxx" + 1001 * ".") == 1004 * [128.0]
    assert not scaler.is_spent


@pytest.mark.parametrize(
    ("settings", "precision", "message"),
    [
        ({"hysteresis": 4}, "bf16-mixed", "precision.hysteresis=4 would do nothing: precision='bf16-mixed' needs no"),
        ({"loss_scale": 64}, "32-true", "precision.loss_scale=64 would do nothing"),
        ({"keep_fp32": ["head"]}, "32-true", "precision='32-true' has no 16-bit numbers"),
        ({"updates": "direct"}, "16-mixed", "precision.updates='direct' would do nothing: precision='16-mixed' has no"),
        ({"updates": "stochastic"}, "16-true", "only bf16 is rounded stochastically"),
        ({"updates": "direct"}, "16-true", "small updates of fp16 weights would be lost"),
    ],
)
def test_settings_that_a_precision_does_not_use_are_refused(
    settings: dict[str, Any], precision: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionConfig(**settings).check_for(precision)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_scale": 64, "hysteresis": 4}, "precision.hysteresis=4 would do nothing: precision.loss_scale=64"),
        ({"loss_scale": 0}, "precision.loss_scale=0 is not allowed"),
        ({"initial_scale_power": 2, "min_loss_scale": 8}, "precision.min_loss_scale=8 is more than the first scale"),
        ({"initial_scale_power": 128}, "precision.initial_scale_power=128 makes every loss infinite"),
        ({"loss_scale": 1e39}, r"precision.loss_scale=1e\+39 makes every loss infinite"),
        ({"min_loss_scale": 0}, "precision.min_loss_scale=0.* would let the scale become 0"),
        ({"hysteresis": 0}, "precision.hysteresis=0 is not allowed"),
        ({"updates": "masters"}, "nearest: 'master'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionConfig(**settings)
