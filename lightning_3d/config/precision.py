"""The settings of 16-bit precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar, Literal

from lightning_3d.config.checks import Size, check_values
from lightning_3d.config.values import AtLeast
from lightning_3d.errors import ConfigError

PrecisionName = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true", "64-true"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """How 16-bit numbers train a model; ``Trainer(precision=...)`` says which numbers."""

    section: ClassVar[str] = "precision"

    updates: Literal["auto", "master", "direct"] = "auto"
    """How optimizers step 16-bit parameters (``"16-true"``, ``"bf16-true"``). ``"master"``: in fp32 copies of them,
    which the ranks share as optimizer states. ``"direct"``: as they are, with 16-bit states, as Lightning does in one
    process; for bf16 only. ``"auto"`` is ``"master"``. What code writes to a parameter counts in all of them."""

    keep_fp32: tuple[str, ...] = ()
    """Modules that compute in fp32, by patterns of their FQN (``"blocks.*.norm1"``; ``*`` and ``?`` as in a shell), and
    whose weights stay fp32 where others become 16-bit."""

    loss_scale: Annotated[float, AtLeast(1)] | Literal["dynamic"] = "dynamic"
    """The factor of losses, and so of gradients until they are unscaled, with fp16. ``"dynamic"`` halves it when
    gradients overflow, and doubles it after a while without overflow, as ``torch.amp.GradScaler`` does. A step that
    overflows anywhere is skipped everywhere, with its learning-rate schedulers; at scale 1 it ends the training."""

    initial_scale_power: Annotated[int, AtLeast(0)] = 16
    """The dynamic scale begins at 2 to this power."""

    loss_scale_window: Size = 2000
    """Steps without overflow after which the dynamic scale doubles, as in ``torch.amp.GradScaler``."""

    def __post_init__(self) -> None:
        check_values(self)
        if self.loss_scale != "dynamic":
            self._refuse(_DYNAMIC, f"precision.loss_scale={self.loss_scale} is fixed")

    def check_for(self, precision: PrecisionName) -> None:
        """Refuse what does nothing in a precision.

        Raises:
            ConfigError: a key was given that has no meaning there.
        """
        if not precision.startswith("16-"):
            self._refuse(("loss_scale", *_DYNAMIC), f"precision={precision!r} needs no scaled losses, only fp16 does")
        if precision not in ("16-true", "bf16-true"):
            self._refuse(("updates",), f"precision={precision!r} has no 16-bit parameters")
        if precision in ("32-true", "64-true"):
            self._refuse(("keep_fp32",), f"precision={precision!r} has no 16-bit numbers")
        if precision == "16-true" and self.updates == "direct":
            raise ConfigError(
                "precision.updates='direct' with precision='16-true': small updates of fp16 weights would be lost, and"
                " their unscaled gradients, too. Use precision='bf16-true', or precision.updates='master'"
            )

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value != _DEFAULTS[name]:
                raise ConfigError(f"precision.{name}={value!r} would do nothing: {reason}. Leave it out")


_DYNAMIC = ("initial_scale_power", "loss_scale_window")
"""Keys of the dynamic scale."""

_DEFAULTS: Mapping[str, object] = {item.name: item.default for item in fields(PrecisionConfig)}
