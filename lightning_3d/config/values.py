"""The values that an annotation allows: the test, and the words for it.

Covers the annotations that the config uses: ``int``, ``float``, ``bool``, ``str``, ``None``, ``Literal``, unions,
tuples of any length, dataclasses, and ``Annotated`` with an :class:`AtLeast`. It knows nothing of keys and raises
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin


@dataclass(frozen=True, slots=True)
class AtLeast:
    """Marks the smallest allowed value of a number, as in ``Annotated[int, AtLeast(1)]``."""

    minimum: int


def accepts(annotation: Any, value: Any) -> bool:
    """Whether `value` is exactly of the annotated kind: a bool is no int and a string no number."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, mark = get_args(annotation)
        return accepts(kind, value) and bool(value >= mark.minimum)
    if origin in (Union, UnionType):
        return any(accepts(option, value) for option in get_args(annotation))
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(annotation))
    if origin is tuple:
        return type(value) is tuple and all(accepts(get_args(annotation)[0], item) for item in value)
    if annotation is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is annotation


def describe(annotation: Any) -> str:
    """The values that an annotation allows, in words."""
    origin = get_origin(annotation)
    if origin is Annotated:
        kind, mark = get_args(annotation)
        return f"{describe(kind)} of at least {mark.minimum}"
    if origin in (Union, UnionType):
        return " or ".join(describe(option) for option in get_args(annotation))
    if origin is Literal:
        *first, last = (repr(choice) for choice in get_args(annotation))
        return f"{', '.join(first)} or {last}" if first else last
    if origin is tuple:
        return f"a list, of which each item is {describe(get_args(annotation)[0])}"
    if is_dataclass(annotation):
        return f"a {cast(type, annotation).__name__} (ThreeDConfig.from_mapping takes nested mappings)"
    words = {int: "an integer", float: "a number", bool: "True or False", str: "a string", NoneType: "None"}
    return words[annotation]
