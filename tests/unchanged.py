"""What torch, Lightning and the process are, to see whether a run has left them as they were before it."""

from __future__ import annotations

import gc
import signal
import sys
import types
import warnings
from typing import Any

import matplotlib as mpl
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import nn

from lightning_3d.torch_internals.fake_tensors import FakeTensorMode
from lightning_3d.torch_internals.pytree import registered_dataclasses

_PACKAGES = ("torch", "lightning", "torchmetrics", "lightning_utilities")
_CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, type)
IN_CLASSES = (*_CODE, staticmethod, classmethod, property, types.GetSetDescriptorType)
_MEMBERS = frozenset(IN_CLASSES)
"""Nearly all members are of exactly these types, which is known sooner than a subclass."""
_REPLACED = ("torch.utils.data.dataloader", "torch.utils.data.sampler")

Present = dict[str, Any]


def code_of_packages() -> Present:
    """Every function, method, class and property in the modules of the packages, by its name."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind([nn.Parameter(torch.zeros(1))])  # the first one of its class wraps the class's methods
    found: Present = {}
    modules = {n: m for n, m in list(sys.modules.items()) if n.partition(".")[0] in _PACKAGES and m is not None}
    for name, module in modules.items():
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), _CODE):  # isinstance would ask deprecated stand-ins, which warn
                found[f"{name}.{attribute}"] = value
            if issubclass(type(value), type) and value.__module__ == name:
                for member, code in list(vars(value).items()):
                    if type(code) in _MEMBERS or isinstance(code, IN_CLASSES):
                        found[f"{name}.{attribute}.{member}"] = code
    return found


def state_of_torch() -> Present:
    return {
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "default dtype": torch.get_default_dtype(),
        "anomaly": torch.is_anomaly_enabled(),
        "registered dataclasses": registered_dataclasses(),
        "log of fake tensors": sys.modules[FakeTensorMode.__module__].log.disabled,
        "cache of autograd graphs": torch._functorch.config.enable_autograd_cache,
    }


def state_of_the_process() -> Present:
    return {
        "backend of matplotlib": mpl.rcParams._get("backend"),
        "handlers of signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hook for exceptions": sys.excepthook,
        "filters of warnings": list(warnings.filters),
        "rank": rank_zero_only.rank,
        "tracing": (sys.gettrace(), sys.getprofile()),
        "recording of modules": gc.isenabled(),
    }


def _difference(before: Any, after: Any) -> str:
    if isinstance(before, set) and isinstance(after, set):
        return f"lost {sorted(before - after)}, got {sorted(after - before)}"
    return f"{before!r} -> {after!r}"


def changed(before: Present, after: Present) -> list[str]:
    """Names whose value is another one; what was imported meanwhile has none."""
    return [
        f"{name}: {_difference(value, after.get(name))}"
        for name, value in before.items()
        if after.get(name) is not value and (isinstance(value, _CODE) or after.get(name) != value)
    ]


def added(before: Present, after: Present) -> list[str]:
    """New functions in classes that were there before; Lightning leaves some on dataloaders with another sampler, and
    transformers has some of its own.
    """
    owners = {name for name, value in before.items() if isinstance(value, type) and value.__module__ not in _REPLACED}
    new = [name for name in after.keys() - before.keys() if name.rpartition(".")[0] in owners]
    return [name for name in new if not str(getattr(after[name], "__module__", "")).startswith("transformers.")]
