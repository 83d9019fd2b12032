"""References of modules to parameters besides their own names: in lists, tuples, dicts and sets, and in plain objects
of the user's classes, as of weights for a penalty or without decay. They follow where others take their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_3d.model.containers import CONTAINERS, content_of, is_filled_with, refill
from lightning_3d.model.snapshot import MOST_FOLLOWED, is_plain_object, package_of

_OF_TORCH = frozenset(vars(nn.Module()))


def follow(module: nn.Module, successors: Mapping[Tensor, Tensor]) -> None:
    """Let what the modules inside of one keep refer to the successors of parameters.

    Args:
        successors: Parameter -> what has taken its place.
    """
    if not successors:
        return
    references = _References(successors, package_of(type(module)))
    for inner in module.modules():
        references.update(vars(inner))


class _References:
    """Changes references in place, each container and object once."""

    def __init__(self, successors: Mapping[Tensor, Tensor], package: str) -> None:
        self._successors, self._package = successors, package
        self._seen: dict[int, object] = {}

    def update(self, attributes: dict[str, object]) -> None:
        for name in attributes.keys() - _OF_TORCH:
            if (now := self._followed(value := attributes[name])) is not value:
                attributes[name] = now

    def _followed(self, value: object) -> Any:
        if isinstance(value, Tensor):
            return self._successors.get(value, value)
        if isinstance(value, tuple):
            return self._of_tuple(value)
        if id(value) in self._seen:
            return value
        if isinstance(value, CONTAINERS):
            self._seen[id(value)] = value
            if len(value) <= MOST_FOLLOWED:
                self._refill(value)
        elif is_plain_object(value, self._package):
            self._seen[id(value)] = value
            self.update(getattr(value, "__dict__", {}))
        return value

    def _of_tuple(self, value: tuple[object, ...]) -> tuple[object, ...]:
        now = [self._followed(entry) for entry in value]
        if all(entry is before for entry, before in zip(now, value, strict=True)):
            return value
        return type(value)(*now) if hasattr(value, "_fields") else tuple(now)

    def _refill(self, container: Any) -> None:
        content = content_of(container)
        now: Any
        if isinstance(content, dict):
            now = {self._followed(key): self._followed(entry) for key, entry in content.items()}
        else:
            now = type(content)(map(self._followed, content))
        if not is_filled_with(container, now):
            refill(container, now)
