"""Names of a model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Every parameter and buffer under every name that it has, with the module that owns it under that name."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for members in (owner._parameters, owner._buffers):
            for name, tensor in members.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor, owner
