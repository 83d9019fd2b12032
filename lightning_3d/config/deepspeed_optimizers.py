"""The optimizer and the learning rates of a DeepSpeed config, as DeepSpeed builds them, with its defaults."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lightning_3d.errors import ConfigError

_LR = 1e-3

_OPTIMIZERS: Mapping[str, Mapping[str, object]] = {
    "adam": {"lr": _LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
    "adamw": {"lr": _LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False},
    "sgd": {"lr": _LR, "momentum": 0, "dampening": 0, "weight_decay": 0.0, "nesterov": False},
}
"""Type, in lower case -> what it takes, and DeepSpeed's defaults."""

_IGNORED = {"bias_correction": True, "fused": None, "set_grad_none": None, "fp32_optimizer_states": True}
"""Further parameters that DeepSpeed takes -> the value that changes nothing here; None for any."""

_WARMUP = {"warmup_num_steps": 1000, "warmup_type": "log"}
_LRS = {"warmup_min_lr": 0.0, "warmup_max_lr": _LR}
_SCHEDULERS: Mapping[str, Mapping[str, object]] = {
    "WarmupLR": {**_WARMUP, **_LRS, "warmup_max_lr": None},  # that of the optimizer
    "WarmupDecayLR": {**_WARMUP, **_LRS, "total_num_steps": None},
    "WarmupCosineLR": {**_WARMUP, "warmup_min_ratio": 0.0, "cos_min_ratio": 1e-4, "total_num_steps": None},
}


def checked(key: str, section: object) -> tuple[str, dict[str, object]]:
    """The type that a config's ``optimizer`` or ``scheduler`` names, and all of its parameters.

    Raises:
        ConfigError: it is built otherwise here, or not at all.
    """
    section = section if isinstance(section, Mapping) else {}
    kind, given = str(section.get("type")), section.get("params") or {}
    given = {name: value for name, value in given.items() if value != "auto"}
    name = kind.lower() if key == "optimizer" else kind
    known = (_OPTIMIZERS if key == "optimizer" else _SCHEDULERS).get(name)
    asked = ", ".join(f"{name}={value!r}" for name, value in given.items())
    fix = f"return it from configure_optimizers, and say leave_out=[{key!r}]"
    if known is None:
        raise ConfigError(f"the DeepSpeed config has the {key} {kind}({asked}), which is not built here: {fix}")
    mode = {"adam_w_mode": True, "torch_adam": False} if name in ("adam", "adamw") else {}
    read = {**known, **mode}
    for parameter, value in given.items():
        if parameter in read:
            read[parameter] = tuple(value) if isinstance(value, list) else value
        elif parameter not in _IGNORED or _IGNORED[parameter] not in (None, value):
            raise ConfigError(f"the DeepSpeed config has {key}.params.{parameter}={value!r}, not known here: {fix}")
    if "total_num_steps" in read and read["total_num_steps"] is None:
        raise ConfigError(f"the DeepSpeed config has the scheduler {kind} without total_num_steps: add it, or {fix}")
    return name, read


def build(module: LightningModule, sections: Mapping[str, tuple[str, dict[str, Any]]]) -> Any:
    """Build the optimizer and scheduler that `checked` has read, as ``configure_optimizers`` returns them."""
    optimizer = _optimizer(module, *sections["optimizer"])
    if "scheduler" not in sections:
        return optimizer
    kind, given = sections["scheduler"]
    (base,) = {group["lr"] for group in optimizer.param_groups}
    if base == 0:
        raise ConfigError("the DeepSpeed config has optimizer.params.lr=0 and a scheduler: give it a rate")
    schedule = LambdaLR(optimizer, partial(_factor, kind, given, base))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _optimizer(module: LightningModule, kind: str, given: dict[str, Any]) -> Optimizer:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(parameters, **given)
    settings = {name: value for name, value in given.items() if name not in ("adam_w_mode", "torch_adam")}
    is_decoupled = kind == "adamw" or given["adam_w_mode"]
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(parameters, **settings)


def _factor(kind: str, given: Mapping[str, Any], base: float, step: int) -> float:
    """The learning rate of a step, from 0, over the optimizer's. DeepSpeed counts from -1, which is as 0."""
    number, num_warmups = max(0, step - 1), max(2, given["warmup_num_steps"])
    is_warming = number < num_warmups
    if not is_warming:
        part = _after(kind, given, number, num_warmups)
    elif given["warmup_type"] == "linear":
        part = number / num_warmups
    else:
        part = math.log(number + 1) / math.log(num_warmups)
    if kind == "WarmupCosineLR":
        least = given["warmup_min_ratio"] if step else 0.0
        return float(least + (1 - least) * part if is_warming else part)
    least, most = given["warmup_min_lr"], base if given["warmup_max_lr"] is None else given["warmup_max_lr"]
    return float((least + (most - least) * part) / base)


def _after(kind: str, given: Mapping[str, Any], number: int, num_warmups: int) -> float:
    """The factor of the learning rate in a step after those of warming up."""
    if kind == "WarmupLR":
        return 1.0
    total = given["total_num_steps"]
    if kind == "WarmupDecayLR":
        return float(max(0.0, (total - number) / max(1.0, total - num_warmups)))
    least, done = given["cos_min_ratio"], min(1.0, (number - num_warmups + 1) / max(1, total - num_warmups))
    return float(max(0.0, least + (1 - least) * (1 + math.cos(math.pi * done)) / 2))


@contextmanager
def optimizers_given(module: LightningModule, built: Mapping[str, tuple[str, dict[str, Any]]]) -> Iterator[None]:
    """Let a module without ``configure_optimizers`` have one inside that builds what a DeepSpeed config says.

    Raises:
        ConfigError: the module has one, but the config a scheduler that it may lack.
    """
    name, has_own = type(module).__name__, is_overridden("configure_optimizers", module)
    if built and not has_own and "optimizer" not in built:
        raise ConfigError(
            f"the DeepSpeed config has a scheduler and no optimizer, and {name} no configure_optimizers: add an"
            " optimizer to one of them"
        )
    if "scheduler" in built and has_own:
        raise ConfigError(
            f"the DeepSpeed config has a scheduler, but {name} has a configure_optimizers of its own: return the"
            " scheduler from there, too, and say leave_out=['scheduler']"
        )
    if built and has_own:
        rank_zero_info("The optimizer of the DeepSpeed config is left out: configure_optimizers returns one.")
    if not built or has_own:
        yield
        return
    module.configure_optimizers = lambda: build(module, built)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del vars(module)["configure_optimizers"]
