"""Functions of torch that compute each element of their result from the same element of their arguments, by name."""

from __future__ import annotations

_ARITHMETIC = {
    *("abs", "neg", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow"),
    *("sqrt", "rsqrt", "square", "exp", "log", "sign", "reciprocal", "lerp", "addcmul", "addcdiv", "clamp", "clip"),
    *("clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "nan_to_num", "sigmoid", "tanh", "relu"),
}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "invert", "and", "or"}
_MAKING = {"clone", "contiguous", "copy", "zero", "fill", "empty_like", "zeros_like", "ones_like", "full_like"}
_CONVERTING = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "bool", "type_as"}
_VIEWING = {"view_as", "expand_as"}  # a parameter as itself: whoever looks for the node that accumulates its gradient

_OPERATORS = _ARITHMETIC | _COMPARISONS
_FUNCTIONS = _OPERATORS | _MAKING | _CONVERTING | _VIEWING


def is_elementwise(name: str) -> bool:
    """Whether a function, or its form that changes its first argument, computes element by element.

    Of those of lists these are the forms that change their first one.
    """
    if name.startswith("__"):
        name = name.strip("_")
        return name in _OPERATORS or name[1:] in _OPERATORS  # radd, iadd
    if name.startswith("_foreach_"):
        return name.endswith("_") and name.removeprefix("_foreach_").strip("_") in _FUNCTIONS
    return name.removesuffix("_") in _FUNCTIONS
