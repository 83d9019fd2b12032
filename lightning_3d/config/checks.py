"""Checking every field of a section against its annotation."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

from lightning_3d.config.values import AtLeast, accepts, describe
from lightning_3d.errors import ConfigError

Size = Annotated[int, AtLeast(1)]


TYPE_PREFIX = "type:"
"""Begins a rule that names blocks by a regular expression for their classes."""


def check_type_rule(key: str, rule: str) -> None:
    """Refuse a rule with ``TYPE_PREFIX`` whose regular expression does not compile."""
    try:
        re.compile(rule.removeprefix(TYPE_PREFIX))
    except re.error as error:
        raise ConfigError(f"{key}={rule!r} is no regular expression after '{TYPE_PREFIX}': {error}") from None


def check_values(config: Any) -> None:
    """Check every field of a frozen dataclass against its annotation; lists become tuples, and paths strings."""
    prefix = f"{config.section}." if config.section else ""
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        if get_origin(annotation) is ClassVar:
            continue
        value = getattr(config, name)
        plain = _plain(value)
        if not accepts(annotation, plain):
            raise ConfigError(f"{prefix}{name}={value!r} is not allowed: use {describe(annotation)}")
        if plain is not value:
            object.__setattr__(config, name, plain)


def _plain(value: object) -> object:
    """A value from Python or YAML as configs hold it."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return os.fspath(value) if isinstance(value, os.PathLike) else value
