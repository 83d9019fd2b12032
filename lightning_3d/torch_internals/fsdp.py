"""FSDP2: the memory in which units keep their shards, and their state between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass


def reset(root: FSDPModule, parameters: Iterable[nn.Parameter]) -> None:
    """Bring all units to where they are between steps, with the gradients of their sharded parameters.

    ``reset_iter_state`` serves steps that failed, and drops gradients since torch 2.15.
    """
    with DisableTorchFunctionSubclass():
        gradients = [(parameter, parameter.grad) for parameter in parameters]
        root.reset_iter_state()
        for parameter, gradient in gradients:
            if gradient is not None:
                parameter.grad = gradient


def groups_of(unit: FSDPModule) -> Iterator[Any]:
    """The groups of parameters of a unit."""
    yield from fully_shard.state(unit)._fsdp_param_groups  # type: ignore[attr-defined]


def shards_of(unit: FSDPModule) -> list[Tensor]:
    """The memory of the shards of a unit's own parameters, padding included."""
    return [sharded._sharded_param_data for group in groups_of(unit) for sharded in group.fsdp_params]


def move_shards(unit: FSDPModule, memory: Callable[[torch.Size, torch.dtype], Tensor]) -> None:
    """Let the shards of a unit's own parameters lie in other memory; parameters stay the same objects.

    Args:
        memory: Makes a tensor on the CPU, for a unit with ``CPUOffloadPolicy(pin_memory=False)``.
    """
    for group in groups_of(unit):
        for sharded in group.fsdp_params:
            local = sharded.sharded_param._local_tensor
            padded = memory(sharded.padded_sharded_param_size, local.dtype)
            padded.view(-1).copy_(sharded._sharded_param_data)
            sharded._sharded_param_data = padded.view(-1)
            dim = sharded.fsdp_placement.dim
            length = local.size(dim) if local.numel() else 0
            sharded.sharded_param._local_tensor = padded.narrow(dim, 0, length)


def when_gathered(unit: FSDPModule, gathered: Callable[[list[Tensor]], None]) -> None:
    """Call a function with the memory of a unit's shards whenever they have been copied to be gathered.

    A custom all-gather would not do: a mesh of one rank has none.
    """
    for group in groups_of(unit):
        group._to_unsharded = _Then(group, group._to_unsharded, gathered)


class _Then:
    def __init__(self, group: Any, become: Callable[[], None], gathered: Callable[[list[Tensor]], None]) -> None:
        self._group, self._become, self._gathered = group, become, gathered

    def __call__(self) -> None:
        self._become()
        self._gathered([sharded._sharded_param_data for sharded in self._group.fsdp_params])
