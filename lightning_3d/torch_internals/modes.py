"""Modes that see the calls of torch: operators (dispatch modes) and functions (function modes), and their stacks."""

from __future__ import annotations

from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "TorchDispatchMode",
    "no_dispatch_modes",
    "pop_function_mode",
    "push_function_mode",
]

no_dispatch_modes = _disable_current_modes
"""A context in which no dispatch mode is active, fake tensors' included."""

pop_function_mode = _pop_torch_function_stack
"""Take the innermost function mode off the stack; ``TorchFunctionMode`` itself can only leave in order."""

push_function_mode = _push_on_torch_function_stack
"""Put a function mode on top of the stack."""
