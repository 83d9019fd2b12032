"""Scaled losses of fp16: every optimizer has a scale, and all ranks skip the same steps.

    backward       losses, and so gradients, carry the smallest scale of the optimizers that it trains
    before a step  gradients are unscaled (with manual optimization after every backward, as code may look at them),
                   and ranks agree on whether any of them overflowed; then hooks see them, and they are clipped
    step           skipped by all ranks if there was an overflow
    after a step   the optimizer's scale moves

`LossScaler` says how it moves.
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
from lightning_3d.errors import CheckpointError, StepError
from lightning_3d.precision.loss_scaler import LossScaler
from lightning_3d.torch_internals.dispatch import unscale_and_check

HeldGradients = Callable[[Iterable[nn.Parameter]], Sequence[Tensor]]


class ScaledGradients:
    """The gradients of one optimizer, and the factor that they carry.

    Args:
        held: Gives the plain tensors that the gradients of parameters lie in on this rank.
    """

    def __init__(self, optimizer: Optimizer, scaler: LossScaler, held: HeldGradients) -> None:
        self._optimizer, self._held = optimizer, held
        self.scaler = scaler
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
    """The loss scales of all optimizers.

    Args:
        held: Gives the plain tensors that the gradients of parameters lie in on this rank.
        names: Parameter -> its FQN, in the module's order.
        device: The strategy's.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        config: PrecisionConfig,
        *,
        held: HeldGradients,
        names: Mapping[nn.Parameter, str],
        device: torch.device,
    ) -> None:
        self._held, self._names, self._device = held, names, device
        self._scaled = {optimizer: ScaledGradients(optimizer, LossScaler(config), held) for optimizer in optimizers}

    @property
    def scales(self) -> list[float]:
        """By optimizer."""
        return [scaled.scaler.scale for scaled in self._scaled.values()]

    @property
    def factor(self) -> float:
        """The factor of the loss whose backward comes."""
        return min((scaled.scaler.scale for scaled in self._trained()), default=1.0)

    def _trained(self) -> list[ScaledGradients]:
        return [scaled for scaled in self._scaled.values() if scaled.is_trained]

    def before_backward(self) -> None:
        """Before the backward of a scaled loss adds its gradients."""
        factor = self.factor
        for scaled in self._trained():
            scaled.bring_to(factor)
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
        if scaled.has_overflowed and scaled.scaler.is_spent:
            raise StepError(
                f"The gradient of {self._first_not_finite(scaled)} is not finite at the smallest loss scale,"
                f" precision.min_loss_scale={scaled.scaler.scale:g}, so the loss scale can't be halved once more."
                " The model or its data make these values, not the scale: look at them with"
                " Trainer(detect_anomaly=True), or train with precision='bf16-mixed'."
            )

    def _first_not_finite(self, scaled: ScaledGradients) -> str:
        """The FQN of the first parameter of the module with such a gradient on any rank."""
        indices = {parameter: index for index, parameter in enumerate(self._names)}
        found = [len(indices)]
        for parameter in scaled.parameters():
            if parameter in indices and any(not g.isfinite().all() for g in self._held([parameter])):
                found.append(indices[parameter])
        first = torch.tensor([min(found)], device=self._device)
        dist.all_reduce(first, dist.ReduceOp.MIN)
        return list(self._names.values())[int(first.item())]

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
                f" scale {self._scaled[optimizer].scaler.scale:g}) that were not checked for overflows. Call step() of"
                " what self.optimizers() returns."
            )

    def after_step(self, optimizer: Optimizer) -> None:
        """Move the optimizer's scale after a step, or a skipped one."""
        scaled = self._scaled[optimizer]
        before = scaled.scaler.scale
        scaled.scaler.update(has_overflowed=scaled.has_overflowed)
        if scaled.has_overflowed:
            rank_zero_info(
                f"Gradients overflowed, so {type(optimizer).__name__} skipped a step; the loss scale was {before:g} and"
                f" is {scaled.scaler.scale:g}."
            )

    def state_dict(self) -> list[dict[str, float | int]]:
        """The state of each optimizer's scaler."""
        return [scaled.scaler.state_dict() for scaled in self._scaled.values()]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Go on from a checkpoint.

        Raises:
            CheckpointError: it has scales of another number of optimizers.
        """
        if len(states) != len(self._scaled):
            raise CheckpointError(
                f"the checkpoint has loss scales of {len(states)} optimizers, but configure_optimizers returned"
                f" {len(self._scaled)}"
            )
        for scaled, state in zip(self._scaled.values(), states, strict=True):
            scaled.scaler.load_state_dict(state)
