"""Checking every field of a section against its annotation."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, get_origin, get_type_hints

from lightning_3d.config.values import AtLeast, accepts, describe, nearest_value
from lightning_3d.errors import ConfigError

Size = Annotated[int, AtLeast(1)]


def check_values(config: Any) -> None:
    """Check every field of a config dataclass against its annotation."""
    prefix = f"{config.section}." if config.section else ""
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        if get_origin(annotation) is ClassVar:
            continue
        value = getattr(config, name)
        if not accepts(annotation, value):
            nearest = nearest_value(annotation, value)
            hint = "" if nearest is None else f" (nearest: {nearest!r})"
            raise ConfigError(f"{prefix}{name}={value!r} is not allowed: use {describe(annotation)}{hint}")
