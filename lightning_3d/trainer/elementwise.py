"""Functions of torch that compute each element of their result from the same element of their arguments."""

from __future__ import annotations

from typing import Any

_ARITHMETIC = {
    *("abs", "neg", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow"),
    *("sqrt", "rsqrt", "square", "exp", "log", "sign", "reciprocal", "lerp", "addcmul", "addcdiv", "clamp", "clip"),
    *("clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "nan_to_num", "sigmoid", "tanh", "relu"),
}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "invert", "and", "or"}
_MAKING = {"clone", "contiguous", "copy", "zero", "fill", "empty_like", "zeros_like", "ones_like", "full_like"}
_CONVERTING = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "bool", "type_as"}

_ELEMENTWISE = _ARITHMETIC | _COMPARISONS | _MAKING | _CONVERTING


def is_elementwise(func: Any) -> bool:
    """Whether a function, or its form that changes its first argument, computes element by element."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        name = name.strip("_")
        return name in _ARITHMETIC | _COMPARISONS or name[1:] in _ARITHMETIC | _COMPARISONS  # radd, iadd
    if name.startswith("_foreach_"):
        return name.endswith("_") and name.removeprefix("_foreach_").strip("_") in _ELEMENTWISE
    return name.removesuffix("_") in _ELEMENTWISE
