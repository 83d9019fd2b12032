"""Whether a call draws random numbers."""

from __future__ import annotations

from typing import Any

import torch

from lightning_3d.torch_internals.dispatch import TorchDispatchMode, schema_of


class RandomnessSeen(TorchDispatchMode):
    """Notes whether an operator that draws random numbers was called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs)
        return func(*args, **kwargs)


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether it is an attention whose dropout is off: those count as random whatever their dropout."""
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return given == 0.0
    return False
