"""Changes that a block makes in objects among its arguments that pytrees do not look into: layers fill a cache that
they share, and each reads what those before it left.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from lightning_3d.model.pytrees import is_opaque, is_same
from lightning_3d.torch_internals.pytree import tree_leaves

PLAIN = (bool, int, float, complex, str, bytes, type(None))

State = Mapping[tuple[int, str], object]
"""Place of an object among those of the arguments, and name of an attribute -> a plain value, or a list of tensors."""


def state_of(args: tuple[object, ...], kwargs: dict[str, object]) -> State:
    """The attributes of objects among the arguments of a call of which other ranks are told, if they change."""
    return {
        (i, name): list(value) if isinstance(value, list) else value
        for i, leaf in enumerate(_objects_in(args, kwargs))
        for name, value in vars(leaf).items()
        if isinstance(value, PLAIN)
        or (isinstance(value, list) and all(isinstance(item, (Tensor, type(None))) for item in value))
    }


def changed_state(before: State, now: State) -> State:
    """The attributes that a call changed."""
    return {place: value for place, value in now.items() if place not in before or not is_same(before[place], value)}


def set_state(args: tuple[object, ...], kwargs: dict[str, object], changed: State) -> None:
    """Let objects among the arguments have what a call changed; lists stay the objects that they are."""
    objects = _objects_in(args, kwargs) if changed else []
    for (i, name), value in changed.items():
        attributes = vars(objects[i])
        if isinstance(value, list) and isinstance(attributes.get(name), list):
            attributes[name][:] = value
        else:
            attributes[name] = value


def _objects_in(args: tuple[object, ...], kwargs: dict[str, object]) -> list[object]:
    """In an order that tensors which a call puts into a dict do not change."""
    return [leaf for leaf in tree_leaves((args, kwargs)) if is_opaque(leaf)]
