"""The calls of torch: the operators of aten, what they write to, and the modes that see them and functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter

import torch
from torch import Tensor
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    DispatchKey,
    FunctionSchema,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
    _SetExcludeDispatchKeyGuard,
)
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from lightning_3d.torch_internals.pytree import tree_leaves

__all__ = [
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
]

no_dispatch_modes = _disable_current_modes
"""A context in which no dispatch mode is active, fake tensors' included."""

function_modes: Callable[[], list[TorchFunctionMode]] = _get_current_function_mode_stack
"""The function modes that are active, the innermost last."""


@contextmanager
def without_function_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """A context in which a function mode is off the stack; by itself it can only leave in order."""
    if mode not in function_modes():
        yield
        return
    above = []
    while (top := _pop_torch_function_stack()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_on_torch_function_stack(other)
    try:
        yield
    finally:
        above = [_pop_torch_function_stack() for _ in above]
        _push_on_torch_function_stack(mode)
        for other in reversed(above):
            _push_on_torch_function_stack(other)


dispatch_modes: Callable[[], list[TorchDispatchMode]] = _get_current_dispatch_mode_stack
"""The dispatch modes that are active: fake tensors', then others, the innermost last."""

KEEPS_PRODUCTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)
"""The modes of a selective checkpoint: one keeps what operators give, the other hands it out when they run again."""


@contextmanager
def without_modes(classes: tuple[type[TorchDispatchMode], ...]) -> Iterator[None]:
    """A context in which dispatch modes of these classes are not active, and all others are."""
    kept = [mode for mode in dispatch_modes() if not isinstance(mode, classes)]
    with _disable_current_modes():
        for mode in kept:
            _push_mode(mode)
        try:
            yield
        finally:
            for mode in reversed(kept):
                _pop_mode(getattr(mode, "_mode_key", None))


Operator = OpOverload | HigherOrderOperator


IsKept = Callable[[OpOverload], bool]
"""Whether the results of an operator are kept for the backward."""


class OperatorMode(TorchDispatchMode):
    """A dispatch mode that sees higher-order operators, too; FlexAttention's is one, and no ``OpOverload``."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13


GET_DEVICE = Tensor.device.__get__
GET_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a descriptor, a new object every time
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

_INFIX = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_IN_PLACE_OPERATORS = frozenset({"__setitem__", *(f"__i{name}__" for name in _INFIX)})

FUSED_RMS_NORM = torch.ops.aten._fused_rms_norm.default
GROUPED_MM = torch.ops.aten._grouped_mm
INDEX_PUT_IMPL = torch.ops.aten._index_put_impl_.default
LOCAL_SCALAR_DENSE = torch.ops.aten._local_scalar_dense.default
LOG_SOFTMAX = torch.ops.aten._log_softmax.default
RESHAPE_ALIAS = torch.ops.aten._reshape_alias.default
SOFTMAX = torch.ops.aten._softmax.default
SCALED_GROUPED_MM = torch.ops.aten._scaled_grouped_mm
TO_COPY = torch.ops.aten._to_copy.default
UNIQUE2 = torch.ops.aten._unique2.default
UNSAFE_VIEW = torch.ops.aten._unsafe_view.default

_VIEWS_IN_OTHER_DTYPES = (torch.ops.aten.view.dtype, torch.ops.aten.view_as_complex.default)

foreach_multiply = torch._foreach_mul_
"""Multiply each of a list of tensors in place, in one call."""

foreach_norm = torch._foreach_norm
"""The norm of each of a list of tensors, in one call."""

schema_of: Callable[[OpOverload], FunctionSchema] = attrgetter("_schema")
"""Names, defaults and aliases of an operator's arguments."""

unscale_and_check = torch._amp_foreach_non_finite_check_and_unscale_
"""Multiply tensors of one device in place by a factor, and set a flag to 1 where one of them is not finite."""


def is_in_place(name: str) -> bool:
    """Whether a function of torch that is called so changes its first argument."""
    return name in _IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__"))


def used_together(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[list[object]]:
    """The arguments that a function of torch combines: all of them, or, if it takes lists of tensors, those at one
    place of the lists; what it changes comes first.
    """
    given = [*([kwargs["out"]] if kwargs.get("out") is not None else []), *args, *kwargs.values()]
    lists = [value for value in given if isinstance(value, list | tuple)]
    if not name.startswith("_foreach_") or not lists:
        yield tree_leaves(given)
        return
    for i in range(len(lists[0])):
        yield [value[i] if isinstance(value, list | tuple) and i < len(value) else value for value in given]


def name_of(op: Operator) -> str:
    """``"aten::mm"``, ``"aten::mm.dtype"``, ``"flex_attention"``."""
    return str(op.name())  # type: ignore[no-untyped-call]  # torch 2.13


def written_arguments(op: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    """The arguments that an operator writes to; optional ones that were not given are left out."""
    if not isinstance(op, OpOverload) or not schema_of(op).is_mutable:
        return []
    names = {
        argument.name: i
        for i, argument in enumerate(schema_of(op).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    values = [args[i] if i < len(args) else kwargs.get(name) for name, i in names.items()]
    return [value for value in values if value is not None]


@functools.cache
def makes_a_view(op: Operator) -> bool:
    """Whether an operator reads no values and returns one tensor, a view of its argument in the same dtype."""
    if not isinstance(op, OpOverload) or op in _VIEWS_IN_OTHER_DTYPES or len(returns := schema_of(op).returns) != 1:
        return False
    alias = returns[0].alias_info
    return str(returns[0].type) == "Tensor" and alias is not None and not alias.is_write


def is_in_compiled_code() -> bool:
    """Whether something that ``torch.compile`` made is under way, as a dispatch mode sees it."""
    frame = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and "_dynamo" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def alias_below_autograd(tensor: Tensor) -> Tensor:
    """The same data and version counter without history, in a dispatch mode, where autograd's part has been done."""
    with _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@contextmanager
def autograd_recording() -> Iterator[None]:
    """Let autograd record what is computed inside, in the dispatch of an operator whose own part has been recorded."""
    with (
        _SetExcludeDispatchKeyGuard(DispatchKey.AutogradFunctionality, False),
        _SetExcludeDispatchKeyGuard(DispatchKey.ADInplaceOrView, False),
    ):
        yield


def version_counter(tensor: Tensor) -> Tensor:
    """An empty tensor that counts the changes of another, and keeps nothing of its memory."""
    counter = alias_below_autograd(tensor)
    counter.data = tensor.new_empty(0)
    return counter


def draws_random_numbers(op: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether this call of an operator draws random numbers; attention and cuDNN's RNNs do for dropout alone."""
    if not isinstance(op, OpOverload):
        return False
    for i, argument in enumerate(schema_of(op).arguments):
        if argument.name in ("dropout_p", "dropout"):
            return bool(args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value))
    return torch.Tag.nondeterministic_seeded in op.tags


def may_write_any(op: Operator) -> bool:
    """Whether it is an operator whose schema hides that it writes: the collectives behind ``torch.distributed``."""
    return op.namespace == "c10d"
