"""Scaled losses of fp16: one scale for all optimizers, and all ranks skip the same steps.

A step goes like this:

    backward       losses, and so gradients, carry the scale
    before a step  gradients are unscaled (with manual optimization after every backward, as code may look at them),
                   and ranks agree on whether any of them overflowed; then hooks see them, and they are clipped
    step           skipped by all ranks if there was an overflow
    after a step   the scale moves
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.dispatch import unscale_and_check

HeldGradients = Callable[[Iterable[nn.Parameter]], Sequence[Tensor]]

_FACTOR = 2.0
_SMALLEST = 1.0


class LossScale:
    """The factor of losses, moved as ``torch.amp.GradScaler`` moves it, whose states it gives and takes.

    That class looks for overflows in ``grad`` of parameters, on one rank.
    """

    def __init__(self, config: PrecisionConfig) -> None:
        self._is_dynamic = config.loss_scale == "dynamic"
        self._window = config.loss_scale_window
        self.value = 2.0**config.initial_scale_power if config.loss_scale == "dynamic" else float(config.loss_scale)
        """The factor."""
        self._num_steps = 0  # without overflow, since it moved

    @property
    def is_spent(self) -> bool:
        """Whether another overflow can't be answered, as the scale is the smallest one."""
        return self._is_dynamic and self.value <= _SMALLEST

    def update(self, *, has_overflowed: bool) -> None:
        """After a step, or a skipped one."""
        self._num_steps = 0 if has_overflowed else self._num_steps + 1
        if self._is_dynamic and has_overflowed:
            self.value = max(self.value / _FACTOR, _SMALLEST)
        elif self._is_dynamic and self._num_steps == self._window:
            self.value, self._num_steps = self.value * _FACTOR, 0

    def state_dict(self) -> dict[str, object]:
        """As that of a ``GradScaler``."""
        return {
            "scale": self.value,
            "growth_factor": _FACTOR,
            "backoff_factor": 1 / _FACTOR,
            "growth_interval": self._window,
            "_growth_tracker": self._num_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; a fixed scale, and the window, are those of this run."""
        if self._is_dynamic:
            self.value = max(float(state["scale"]), _SMALLEST)
        self._num_steps = min(int(state["_growth_tracker"]), self._window - 1)


class ScaledGradients:
    """The gradients of one optimizer, and the factor that they carry.

    Args:
        held: Gives the plain tensors that the gradients of parameters lie in on this rank.
    """

    def __init__(self, optimizer: Optimizer, held: HeldGradients) -> None:
        self._optimizer, self._held = optimizer, held
        self.factor = 1.0
        self.is_unchecked = False
        """Whether nobody has looked yet for overflows in the backward of a scaled loss."""
        self.has_overflowed = False
        """Whether the last backwards overflowed on any rank, so that no step follows them."""

    @property
    def is_trained(self) -> bool:
        """Whether a backward now would give its parameters gradients."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all groups."""
        for group in self._optimizer.param_groups:
            yield from group["params"]

    @torch.no_grad()
    def bring_to(self, factor: float) -> None:
        """Let the gradients that are there carry the factor of those that are added next."""
        if factor != self.factor:
            for gradient in self._held(self.parameters()):
                gradient.mul_(factor / self.factor)
        self.factor = factor

    @torch.no_grad()
    def unscale(self, device: torch.device) -> None:
        """Take the factor off, and agree with all ranks on whether a gradient is not finite; every rank calls it."""
        # With manual optimization this is in the training step, where 16 bits may be the default.
        found = torch.zeros(1, dtype=torch.float32, device=device)
        by_device: dict[torch.device, list[Tensor]] = {}
        for gradient in self._held(self.parameters()):
            by_device.setdefault(gradient.device, []).append(gradient)
        for place, gradients in by_device.items():
            flag = torch.zeros(1, dtype=torch.float32, device=place)
            unscale_and_check(gradients, flag, torch.full((1,), 1.0 / self.factor, dtype=torch.float32, device=place))
            found += flag.to(device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        self.factor, self.is_unchecked, self.has_overflowed = 1.0, False, bool(found.item())


class LossScaling:
    """The loss scale, and the gradients of all optimizers.

    Args:
        held: Gives the plain tensors that the gradients of parameters lie in on this rank.
        device: The strategy's.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], config: PrecisionConfig, *, held: HeldGradients, device: torch.device
    ) -> None:
        self._device = device
        self._scaled = {optimizer: ScaledGradients(optimizer, held) for optimizer in optimizers}
        self.scale = LossScale(config)
        """That of the loss whose backward comes."""

    def before_backward(self) -> None:
        """Before the backward of a scaled loss adds its gradients."""
        for scaled in (scaled for scaled in self._scaled.values() if scaled.is_trained):
            scaled.bring_to(self.scale.value)
            scaled.is_unchecked, scaled.has_overflowed = True, False

    def take_off(self) -> None:
        """Let all gradients carry no factor, overflows included."""
        for scaled in self._scaled.values():
            scaled.bring_to(1.0)

    def check(self, optimizer: Optimizer) -> None:
        """Unscale an optimizer's gradients before its step, and look for overflows; every rank calls it.

        Raises:
            StepError: they overflowed, and the scale can't be smaller.
        """
        scaled = self._scaled[optimizer]
        scaled.unscale(self._device)
        if scaled.has_overflowed and self.scale.is_spent:
            raise StepError(
                f"Gradients of {type(optimizer).__name__} are not finite at the smallest loss scale,"
                f" {self.scale.value:g}, so the loss scale can't be halved once more."
                " The model or its data make these values, not the scale: look at them with"
                " Trainer(detect_anomaly=True), or train with precision='bf16-mixed'."
            )

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer's last gradients overflowed, so that it did not step."""
        return optimizer in self._scaled and self._scaled[optimizer].has_overflowed

    def refuse_unchecked(self, optimizer: Optimizer) -> None:
        """Before a step.

        Raises:
            StepError: nobody has looked for overflows.
        """
        if optimizer in self._scaled and self._scaled[optimizer].is_unchecked:
            raise StepError(
                f"{type(optimizer).__name__}.step() was called beneath Lightning, with gradients of scaled losses (loss"
                f" scale {self.scale.value:g}) that were not checked for overflows. Call step() of"
                " what self.optimizers() returns."
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Move the scale after a step, or a skipped one."""
        has_overflowed, before = self._scaled[optimizer].has_overflowed, self.scale.value
        self.scale.update(has_overflowed=has_overflowed)
        if has_overflowed:
            rank_zero_info(
                f"Gradients overflowed, so {type(optimizer).__name__} skipped a step; the loss scale was {before:g} and"
                f" is {self.scale.value:g}."
            )
