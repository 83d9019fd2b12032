"""The precision plugin of ``strategy="3d"``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_3d.config.precision import PrecisionConfig, PrecisionName
from lightning_3d.errors import ConfigError, StepError
from lightning_3d.precision.kept_fp32 import keep_fp32
from lightning_3d.precision.loss_scaling import LossScaling
from lightning_3d.torch_internals.dispatch import foreach_multiply
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.master_weights import MasterWeights
from lightning_3d.zero.optimizer_kind import OptimizerKind

_AUTOCAST: Mapping[PrecisionName, torch.dtype] = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

_HALVES: Mapping[PrecisionName, torch.dtype] = {"16-true": torch.float16, "bf16-true": torch.bfloat16}

_TRANSLATED = (Precision, MixedPrecision, HalfPrecision, DoublePrecision)


class ThreeDPrecision(Precision):
    """Precision of computation, scaled losses, and gradient clipping over all axes of the mesh.

    Picked by ``Trainer(precision=...)``; the rest is the section ``precision`` of the strategy's config.

    ==============  ==========================  =======  ==============================================================
    precision       weights, buffers, inputs    compute  the optimizer steps
    ==============  ==========================  =======  ==============================================================
    ``32-true``     as they are                 as they  the weights
                                                are
    ``16-mixed``    as they are                 fp16     the weights; losses are scaled
                                                autocast
    ``bf16-mixed``  as they are                 bf16     the weights
                                                autocast
    ``16-true``     fp16                        fp16     fp32 master weights; losses are scaled
    ``bf16-true``   bf16                        bf16     fp32 master weights (``precision.updates``)
    ``64-true``     fp64                        fp64     the weights
    ==============  ==========================  =======  ==============================================================

    Args:
        precision: One of them. ``ThreeDPrecision("16-mixed")`` computes in fp16 also on CPUs, where Lightning takes
            ``Trainer(precision="16-mixed")`` for ``"bf16-mixed"``, with a warning.

    Raises:
        ConfigError: another precision.
    """

    precision: PrecisionName

    def __init__(self, precision: PrecisionName = "32-true") -> None:
        if precision not in get_args(PrecisionName):
            raise ConfigError(_unknown(repr(precision)))
        self.precision = precision
        self._lightnings = _of_weights(precision)
        self._device = torch.device("cpu")
        self._norm: Callable[[Iterable[nn.Parameter]], Tensor] | None = None
        self._zero: Zero | None = None
        self._end_backward: Callable[[], None] | None = None
        self.scales_itself = True
        """Whether the present loss is scaled before Lightning runs its backward, as no pipeline has done that."""
        self._scaling: LossScaling | None = None
        self._widens = False
        self._names: Mapping[nn.Parameter, str] = {}

    @staticmethod
    def translate(plugin: Precision) -> ThreeDPrecision:
        """The counterpart of the plugin that the Trainer chose by its ``precision`` string.

        Raises:
            ConfigError: there is none.
        """
        if isinstance(plugin, ThreeDPrecision):
            return plugin
        if type(plugin) not in _TRANSLATED:
            raise ConfigError(_unknown(f"{getattr(plugin, 'precision', None)!r} ({type(plugin).__name__})"))
        if isinstance(plugin, MixedPrecision) and plugin.scaler is not None:
            _refuse_other_scaler(plugin.scaler)
        return ThreeDPrecision(plugin.precision)  # type: ignore[arg-type]  # checked there

    @property
    def has_half_weights(self) -> bool:
        """Whether parameters are 16-bit."""
        return self.precision in _HALVES

    @property
    def casts_to(self) -> torch.dtype | None:
        """The dtype to which autocast casts what steps compute with, if they run under it."""
        return _AUTOCAST.get(self.precision)

    @property
    def scales_losses(self) -> bool:
        """Whether losses are scaled."""
        return self.precision in ("16-mixed", "16-true")

    @property
    def loss_scale(self) -> float:
        """The factor of losses; 1 without fp16."""
        return 1.0 if self._scaling is None else self._scaling.scale.value

    # ---- what the strategy tells

    def attach(
        self,
        *,
        norm: Callable[[Iterable[nn.Parameter]], Tensor],
        zero: Zero,
    ) -> None:
        """Tell how to take the norm of gradients over all ranks, and who holds them."""
        self._norm, self._zero, self.scales_itself = norm, zero, True

    @contextmanager
    def before_hooks(self, end: Callable[[], None]) -> Iterator[None]:
        """Let ``end`` run after a backward inside, before ``on_after_backward`` shows its gradients."""
        self._end_backward = end
        try:
            yield
        finally:
            self._end_backward = None

    def __getstate__(self) -> dict[str, object]:
        """A copy takes part in no run."""
        return {**vars(self), "_norm": None, "_zero": None, "_scaling": None, "_names": {}}

    def assign_shards(
        self, kinds: Mapping[Optimizer, OptimizerKind], module: nn.Module, config: PrecisionConfig
    ) -> None:
        """Begin to train with these optimizers.

        Raises:
            ConfigError: gradients of losses that are scaled for fp16 would be unscaled in fp16.
            StepError: one of them can't step fp32 values in place of 16-bit parameters.
        """
        assert self._zero is not None
        self._widens = self.has_half_weights and config.updates != "direct"
        self._names = {parameter: name for name, parameter in module.named_parameters()}
        if self.scales_losses and not self._widens:
            _refuse_fp16(self._names)
        self._scaling = None
        if self.scales_losses:
            held = self._zero.held_gradients
            self._scaling = LossScaling([*kinds], config, held=held, device=self._device)
        if self._widens and (together := [type(o).__name__ for o, kind in kinds.items() if kind == "all"]):
            raise StepError(
                f"{together[0]} steps all parameters together, and remembers them, so that it can't step fp32 master"
                f" weights in their place. Use another optimizer, another precision than {self.precision!r}, or with"
                " bf16-true precision.updates='direct'; or set zero.optimizer_steps if it does not."
            )

    def master_weights(self) -> MasterWeights | None:
        """The fp32 values that optimizers step in place of 16-bit parameters."""
        return MasterWeights() if self._widens else None

    def skips(self, optimizer: Optimizer) -> bool:
        """Whether its last gradients overflowed, so that it did not step."""
        return self._scaling is not None and self._scaling.skips(optimizer)

    def refuse_unchecked(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer.

        Raises:
            StepError: nobody has looked for overflows in its gradients.
        """
        if self._scaling is not None:
            self._scaling.refuse_unchecked(optimizer)

    def after_manual_backward(self) -> None:
        """Let code that steps by hand see gradients, and clip them, as they are stepped."""
        if self._zero is not None and self._widens:
            self._zero.widen_gradients(self._names)
        if self._scaling is not None:
            self._scaling.take_off()

    # ---- weights, inputs, computation

    def convert(self, module: nn.Module, config: PrecisionConfig, device: torch.device) -> None:
        """Give weights and buffers their dtype, before the model is looked at.

        Args:
            device: Where steps compute.

        Raises:
            ConfigError: a pattern of modules to keep in fp32 matches none.
        """
        self._device = device
        self._lightnings.convert_module(module)
        autocast = device.type if self.precision in _AUTOCAST else None
        keep_fp32(module, config.keep_fp32, returned=_HALVES.get(self.precision), autocast=autocast)

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        raise ConfigError(
            f"ThreeDPrecision({self.precision!r}) works with strategy='3d' alone, which scales losses, steps and clips"
            " for it; with another strategy use Trainer(precision=...)"
        )

    @override
    def convert_input(self, data: object) -> object:
        return self._lightnings.convert_input(data)

    @override
    def tensor_init_context(self) -> AbstractContextManager[object]:
        return self._lightnings.tensor_init_context()

    @override
    def module_init_context(self) -> AbstractContextManager[object]:
        return self._lightnings.module_init_context()

    @override
    def forward_context(self) -> AbstractContextManager[object]:
        if self.precision not in _AUTOCAST:
            return self._lightnings.forward_context()
        # Kept casts would outlive a step of their weights in this context; a pipeline keeps them among microbatches.
        return torch.autocast(self._device.type, dtype=_AUTOCAST[self.precision], cache_enabled=False)

    @contextmanager
    def dtype_of_steps(self) -> Iterator[None]:
        """Have constants made in the dtype that steps make them in, where blocks are run without autocast."""
        before = torch.get_default_dtype()
        with self.forward_context():
            dtype = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    # ---- backward and step

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        tensor = super().pre_backward(tensor, module)
        if self._scaling is None:
            return tensor
        self._scaling.before_backward()
        return tensor.float() * self.loss_scale if self.scales_itself else tensor

    @override
    def post_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self._end_backward is not None:
            self._end_backward()
        return super().post_backward(tensor, module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], object], **kwargs: Any
    ) -> object:
        if self._scaling is None:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        if isinstance(optimizer, LBFGS):
            raise StepError(
                f"{type(optimizer).__name__} runs training_step several times per step, which precision="
                f"{self.precision!r} would have to skip when gradients overflow. Use another optimizer, or another"
                " precision."
            )
        result = self._wrap_closure(model, optimizer, closure)
        if not self._scaling.skips(optimizer):
            result = optimizer.step(**kwargs)
        elif self._zero is not None:
            self._zero.drop_gradients(p for group in optimizer.param_groups for p in group["params"])
        self._scaling.after_step(optimizer)
        return result

    @override
    def _wrap_closure(self, model: LightningModule, optimizer: Optimizer, closure: Callable[[], object]) -> object:  # type: ignore[override]
        result = closure()
        if self._zero is not None and self._widens:
            self._zero.widen_gradients(p for group in optimizer.param_groups for p in group["params"])
        if self._scaling is not None:
            self._scaling.check(optimizer)
        self._after_closure(model, optimizer)
        return result

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val <= 0:
            return
        gradients = self._gradients(optimizer)
        assert self._norm is not None
        norm = self._norm(list(self.main_params(optimizer)))
        scale = (clip_val / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_ does
        for device in {gradient.device for gradient in gradients}:
            foreach_multiply([gradient for gradient in gradients if gradient.device == device], scale.to(device))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        if clip_val <= 0:
            return
        for gradient in self._gradients(optimizer):
            overflows = None if self._scaling is None else gradient.isinf()  # looked for later, where steps are manual
            clipped = gradient.clamp_(-clip_val, clip_val)
            if overflows is not None:
                clipped.masked_fill_(overflows, float("inf"))

    def _gradients(self, optimizer: Optimizer) -> list[Tensor]:
        assert self._zero is not None
        return self._zero.held_gradients(self.main_params(optimizer))

    # ---- checkpoints

    @override
    def state_dict(self) -> dict[str, object]:
        return {} if self._scaling is None else self._scaling.scale.state_dict()

    def take_other_scale(self, checkpoint: Mapping[str, Any]) -> None:
        """Go on from the scale of Lightning's own scaler, if a checkpoint has one."""
        self.load_state_dict(checkpoint.get(MixedPrecision.__qualname__, {}))

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        if self._scaling is not None and "scale" in state_dict:
            self._scaling.scale.load_state_dict(state_dict)


def _of_weights(precision: PrecisionName) -> Precision:
    """Lightning's plugin that changes the dtype of weights, buffers and inputs as this precision does."""
    if precision == "16-true" or precision == "bf16-true":
        return HalfPrecision(precision)
    return DoublePrecision() if precision == "64-true" else Precision()


def _refuse_fp16(names: Mapping[nn.Parameter, str]) -> None:
    trained = [
        name for parameter, name in names.items() if parameter.requires_grad and parameter.dtype == torch.float16
    ]
    if trained:
        raise ConfigError(
            f"{trained[0]}, with {len(trained) - 1} others, is fp16 and is trained with precision='16-mixed', whose"
            " gradients would vanish when they are unscaled in fp16. Leave out half(), as autocast computes in fp16;"
            " use precision='16-true', which has fp32 master weights; or freeze it"
        )


def _refuse_other_scaler(scaler: torch.amp.GradScaler) -> None:
    """Refuse a scaler that the user has set, as ours takes its place."""
    if scaler.state_dict() != torch.amp.GradScaler("cpu").state_dict():  # that of a disabled one is empty
        raise ConfigError(
            "a GradScaler with settings of its own would be ignored: strategy='3d' scales losses itself, alike on all"
            " ranks. Leave the scaler out, and set precision.initial_scale_power and precision.loss_scale_window of the"
            " strategy, or precision.loss_scale, of which 1 scales nothing."
        )


def _unknown(name: str) -> str:
    return (
        f"precision={name} is not built for strategy='3d'; use one of {get_args(PrecisionName)}. fp8 is not among them:"
        " its layers keep scales of weights and activations that would have to be agreed on across shards and stages."
    )
