"""The registries of ``nn.Module``: parameters, buffers, children and hooks, by the names under which they are set.

``named_parameters(recurse=False)`` and the like leave out what is registered twice, and none of them can be written to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from lightning_3d.torch_internals.patches import replaced

RunningNorm = _NormBase
"""Norms that may keep running statistics."""

BatchNorm = _BatchNorm
"""Running norms over the batch; the others are instance norms."""

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
"""The attributes that the registries are in."""

UNSAVED_BUFFERS = "_non_persistent_buffers_set"
"""The attribute with the names of those that checkpoints don't have."""

TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
"""The attributes that every module has."""

CALL = "_compiled_call_impl"
"""The attribute that ``module(...)`` calls where it is set, as ``Module.compile`` does. Copies lose it."""

APPLY = "_apply"
"""The method by which ``to``, ``double`` and the like change every parameter and buffer."""

TRUNC_NORMAL = "_no_grad_trunc_normal_"
"""The function of ``torch.nn.init`` by which ``trunc_normal_`` draws, also where that was imported by name."""

Hooks = OrderedDict[int, Callable[..., object]]

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter(PARAMETERS)
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter(BUFFERS)
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter(CHILDREN)
forward_hooks: Callable[[nn.Module], Hooks] = attrgetter("_forward_hooks")
forward_hooks_with_kwargs: Callable[[nn.Module], OrderedDict[int, bool]] = attrgetter("_forward_hooks_with_kwargs")


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Every parameter and buffer under every name that it has, with the module that owns it under that name."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for members in (parameters_of(owner), buffers_of(owner)):
            for name, tensor in members.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor, owner


def put(owner: nn.Module, name: str, tensor: Tensor) -> None:
    """Let a module own another parameter or buffer in place of the one of this name."""
    if type(owner).__setattr__ is not nn.Module.__setattr__:  # an RNN keeps further references to its weights
        setattr(owner, name, tensor)
        return
    members = parameters_of(owner) if name in parameters_of(owner) else buffers_of(owner)
    members[name] = tensor  # type: ignore[assignment]


def move_other_state(module: nn.Module, device: torch.device) -> None:
    """Move what modules keep besides parameters to a device, by their own ways, as metrics have for their states."""
    module._apply(lambda tensor: tensor if isinstance(tensor, nn.Parameter) or tensor.is_meta else tensor.to(device))


def call_of(module: nn.Module) -> Callable[..., object]:
    """The call of ``module(...)`` otherwise: hooks and forward. A compiler can follow it, unlike an ``attrgetter``."""
    return module._call_impl


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of it runs what ``torch.compile(module)`` or ``module.compile()`` made."""
    return is_wrapper_of_compiler(module) or vars(module).get(CALL) is not None


def is_wrapper_of_compiler(module: nn.Module) -> bool:
    """Whether ``torch.compile(module)`` made it."""
    return type(module).__name__ == "OptimizedModule"  # of torch._dynamo, which takes a second to import


def forward_hook_registries(module: nn.Module) -> list[dict[int, Any]]:
    """All registries of hooks that a forward calls."""
    return [
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    ]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether hooks of a module wait for the gradient of its output."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def observer_registries(
    module: nn.Module | None,
) -> tuple[dict[int, Callable[..., object]], dict[int, Callable[..., object]]]:
    """The hooks that may look at what a module is given, and at what it returns; without a module, those for all."""
    if module is None:
        return _global_forward_pre_hooks, _global_forward_hooks
    return module._forward_pre_hooks, module._forward_hooks


def forward_hooks_copied(module: nn.Module) -> AbstractContextManager[None]:
    """Let changes of the module's forward hooks inside end with the context."""
    names = ("_forward_hooks", "_forward_hooks_with_kwargs")
    return replaced("hooks", module, {name: vars(module)[name].copy() for name in names})
