"""The scale of losses in fp16, as DeepSpeed's dynamic loss scaler moves it.

    scale      65536    65536    32768    16384    16384 ...    32768
    overflow         yes      yes      yes       no  (window times)
    hysteresis  2        1        1        1        1            2

With a hysteresis of 2 the first overflow changes nothing yet. Each further one halves the scale, until it has doubled
again, after a window of steps since the last overflow.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.config.precision import PrecisionConfig

_FACTOR = 2.0


class LossScaler:
    """The loss scale of one optimizer, equal on all ranks.

    Args:
        config: Of the scale.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._config = config
        self._is_dynamic = config.loss_scale == "dynamic"
        self.scale = 2.0**config.initial_scale_power if config.loss_scale == "dynamic" else float(config.loss_scale)
        """The factor of losses."""
        self._num_steps, self._last_overflow = 0, -1
        self._hysteresis = config.hysteresis

    @property
    def is_spent(self) -> bool:
        """Whether another overflow can't be answered: the scale is the smallest one."""
        return self._is_dynamic and self._hysteresis <= 1 and self.scale <= self._config.min_loss_scale

    def update(self, *, has_overflowed: bool) -> None:
        """After a step, or a skipped one."""
        if has_overflowed:
            self._shrink()
        elif self._config.consecutive_hysteresis:
            self._hysteresis = self._config.hysteresis
        if not has_overflowed and (self._num_steps - self._last_overflow) % self._config.loss_scale_window == 0:
            self._grow()
        self._num_steps += 1

    def _shrink(self) -> None:
        self._last_overflow = self._num_steps
        if self._hysteresis > 1:
            self._hysteresis -= 1
        elif self._is_dynamic:
            self.scale = max(self.scale / _FACTOR, self._config.min_loss_scale)

    def _grow(self) -> None:
        self._hysteresis = self._config.hysteresis
        if self._is_dynamic:
            self.scale *= _FACTOR

    def state_dict(self) -> dict[str, float | int]:
        """The scale and what its next changes depend on."""
        return {
            "scale": self.scale,
            "num_steps": self._num_steps,
            "last_overflow": self._last_overflow,
            "hysteresis": self._hysteresis,
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Go on from a state; a fixed scale, and the limits, are those of this run."""
        if self._is_dynamic:
            self.scale = max(float(state["scale"]), self._config.min_loss_scale)
        self._num_steps, self._last_overflow = int(state["num_steps"]), int(state["last_overflow"])
        self._hysteresis = min(int(state["hysteresis"]), self._config.hysteresis)
