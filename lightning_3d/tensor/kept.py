"""Activations that a block keeps in attributes, as ``self.weights = weights``, for whoever reads them later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from lightning_3d.tensor.grouped_calls import whole
from lightning_3d.tensor.sharded_activation import ShardedActivation
from lightning_3d.tensor.sharded_output import as_unread


def kept_in(block: nn.Module, is_sharded: Callable[[Tensor], bool]) -> tuple[str, ...]:
    """FQNs of the attributes of a block's modules that hold a tensor of which ``is_sharded`` is true."""
    return tuple(
        f"{prefix}.{name}" if prefix else name
        for prefix, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and is_sharded(value)
    )


def show_kept(block: nn.Module, names: Sequence[str]) -> None:
    """After a forward on shards, let these attributes be full tensors to their readers."""
    for fqn in names:
        owner_name, _, name = fqn.rpartition(".")
        owner = block.get_submodule(owner_name)
        value = getattr(owner, name)
        setattr(owner, name, as_unread(value) if isinstance(value, ShardedActivation) else whole(value))
