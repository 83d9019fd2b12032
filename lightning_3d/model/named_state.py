"""Names of a model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from lightning_3d.torch_internals.modules import buffers_of, parameters_of


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Every parameter and buffer under every name that it has, with the module that owns it under that name."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for members in (parameters_of(owner), buffers_of(owner)):
            for name, tensor in members.items():
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor, owner
