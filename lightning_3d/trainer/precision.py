"""The precision plugin of ``strategy="3d"``: fp32, and bf16 autocast over fp32 weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Literal, get_args

import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.errors import ConfigError
from lightning_3d.zero.engine import Zero

PrecisionName = Literal["32-true", "bf16-mixed"]


class ThreeDPrecision(Precision):
    """Precision of computation, and gradient clipping over all axes of the mesh.

    Picked by ``Trainer(precision=...)``. Weights, gradients, their reduction and the optimizer are fp32 in both;
    ``"bf16-mixed"`` runs steps under ``torch.autocast`` as Lightning does in one process.

    Args:
        precision: ``"32-true"`` or ``"bf16-mixed"``.

    Raises:
        ConfigError: another precision.
    """

    precision: PrecisionName

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ConfigError(
                f"precision={precision!r} is not built yet for strategy='3d'; use one of {get_args(PrecisionName)}"
            )
        self.precision = precision
        self._device_type = "cpu"
        self._norm: Callable[[Iterable[nn.Parameter]], Tensor] | None = None
        self._zero: Zero | None = None

    @staticmethod
    def translate(plugin: Precision) -> ThreeDPrecision:
        """The counterpart of the plugin that the Trainer chose by its ``precision`` string.

        Raises:
            ConfigError: there is none.
        """
        if isinstance(plugin, ThreeDPrecision):
            return plugin
        if type(plugin) not in (Precision, MixedPrecision):
            name = getattr(plugin, "precision", None)
            raise ConfigError(
                f"precision={name!r} ({type(plugin).__name__}) is not built yet for strategy='3d'; use one of"
                f" {get_args(PrecisionName)}"
            )
        return ThreeDPrecision(plugin.precision)  # type: ignore[arg-type]  # checked there

    def attach(self, *, device_type: str, norm: Callable[[Iterable[nn.Parameter]], Tensor], zero: Zero) -> None:
        """Tell the device, how to take the norm of gradients over all ranks, and who holds them."""
        self._device_type, self._norm, self._zero = device_type, norm, zero

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        autocast = torch.autocast(self._device_type, dtype=torch.bfloat16)
        with autocast if self.precision == "bf16-mixed" else nullcontext():
            yield

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val <= 0:
            return
        gradients = self._gradients(optimizer)
        assert self._norm is not None
        norm = self._norm(list(self.main_params(optimizer)))
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        for gradient in gradients:
            gradient.mul_(scale.to(gradient.device))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val <= 0:
            return
        for gradient in self._gradients(optimizer):
            gradient.clamp_(-clip_val, clip_val)

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        if self._zero is None:
            raise ConfigError(
                "ThreeDPrecision clips gradients for strategy='3d' only; use Trainer(precision=...) instead"
            )
        return self._zero.held_gradients(self.main_params(optimizer))
