"""The content of lists, dicts, sets and deques, kept and put back by the methods of the built-in classes."""

from __future__ import annotations

from collections import OrderedDict, deque
from operator import is_
from typing import Any

CONTAINERS = (dict, list, set, deque)
"""Classes whose content is kept, their subclasses included."""


def refill(container: Any, content: Any) -> None:
    """Change what is in a list, deque, set or dict."""
    kind, content = _builtin(container), content_of(content)  # a copy: it may be the container itself
    kind.clear(container)
    if isinstance(container, dict):
        for key, value in content.items():
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, content)


_BUILTIN = frozenset({OrderedDict, *CONTAINERS})


def _builtin(container: object) -> Any:
    """The built-in class behind the container's."""
    kind = type(container)
    return kind if kind in _BUILTIN else next(cls for cls in (OrderedDict, *CONTAINERS) if isinstance(container, cls))


def content_of(container: Any) -> Any:
    """A plain dict, set or list of what is in a container."""
    kind = _builtin(container)
    if isinstance(container, dict):
        return dict(kind.items(container))
    return set(container) if kind is set else list(container)


def is_filled_with(container: Any, content: Any) -> bool:
    """Whether the same objects are in a container as in what `content_of` gave."""
    if len(container) != len(content):
        return False
    kind = _builtin(container)
    if isinstance(container, dict):
        return all(map(is_, kind.keys(container), content)) and all(map(is_, kind.values(container), content.values()))
    return bool(container == content) if kind is set else all(map(is_, container, content))
