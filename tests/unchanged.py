"""What torch, Lightning and the process are, to see whether a run has left them as they were before it."""

from __future__ import annotations

import gc
import operator
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
_IN_CLASSES = (*_CODE, staticmethod, classmethod, property, types.GetSetDescriptorType)
_REGISTERED = "torch.compiler._cache."
"""Where compilers add properties when they are imported."""
_REPLACED = ("torch.utils.data.dataloader", "torch.utils.data.sampler")

Present = dict[str, Any]

Code = dict[str, Present]
"""What modules and classes of the packages have, by their names."""


def code_of_packages() -> Code:
    """What each module of the packages and each of its classes has by now."""
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        kind([nn.Parameter(torch.zeros(1))])  # the first one of its class wraps the class's methods
    found: Code = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in _PACKAGES and module is not None:
            found[name] = members = dict(vars(module))
            for attribute, value in members.items():
                if issubclass(type(value), type) and value.__module__ == name:
                    found[f"{name}.{attribute}"] = dict(vars(value))
    return found


def changed_code(before: Code, after: Code) -> list[str]:
    """Functions, methods, classes and properties that are others, and those that classes have got; what was imported
    meanwhile is neither.

    Lightning leaves methods on dataloaders with another sampler, and transformers has some of its own.
    """
    found: list[str] = []
    for owner, was in before.items():
        now = after.get(owner, {})
        is_same = len(was) == len(now) and all(map(operator.is_, was.values(), now.values()))
        if is_same or owner.startswith(_REGISTERED):
            continue
        code = {name: value for name, value in was.items() if issubclass(type(value), _IN_CLASSES)}
        found += [
            f"{owner}.{name}: {value!r} -> {now.get(name)!r}"
            for name, value in code.items()
            if now.get(name) is not value
        ]
        if "__module__" in was:  # a class
            new = {name: now[name] for name in now.keys() - was.keys() if issubclass(type(now[name]), _IN_CLASSES)}
            found += [f"{owner}.{name}: is new" for name, value in new.items() if _is_seen(owner, value)]
    return found


def _is_seen(owner: str, value: Any) -> bool:
    return not owner.startswith(_REPLACED) and not str(getattr(value, "__module__", "")).startswith("transformers.")


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
    """Names whose value is another one."""
    return [
        f"{name}: {_difference(value, after.get(name))}"
        for name, value in before.items()
        if after.get(name) is not value and (isinstance(value, _CODE) or after.get(name) != value)
    ]
