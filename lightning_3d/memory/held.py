"""The memory that this rank holds whatever it computes: weights, gradients, optimizer states, buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.device_memory import workspaces
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.memory.rank_memory import HeldMemory
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.buckets import bucket_bytes
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.master_weights import is_half
from lightning_3d.zero.optimizer_kind import num_states
from lightning_3d.zero.shard import plain

_WIDE = 4  # bytes of a number of fp32


def held_memory(
    module: nn.Module,
    zero: Zero,
    optimizers: Iterable[Optimizer],
    config: ThreeDConfig,
    mesh: Mesh,
    device: torch.device,
    batch: Any,
) -> HeldMemory:
    """The memory that this rank holds when it trains.

    Args:
        batch: A microbatch.
    """
    dp = mesh.shape.dp
    present = [parameter for parameter in module.parameters() if not parameter.is_meta]
    trained = [parameter for parameter in present if parameter.requires_grad]
    on_device = [parameter for parameter in present if plain(parameter).device == device]
    buffers = [buffer for buffer in module.buffers() if not buffer.is_meta]
    whole = _num_bytes(trained)
    if config.precision.updates != "direct":
        whole += _num_bytes(parameter for parameter in trained if is_half(parameter))  # gradients end in fp32
    return HeldMemory(
        weights=_num_bytes(on_device) + _num_bytes(buffers),
        gradients=whole // zero.num_sharing if dp > 1 and config.zero.stage in (1, 2) else whole,
        optimizer_states=0 if config.zero.offload_optimizer != "none" else _states(zero, optimizers, config),
        batch=config.num_microbatches * bytes_of(batch),
        communication=_buffers(module, zero, config, dp),
        workspaces=workspaces(device),
        step=_step(trained, zero, device),
    )


def bytes_of(batch: Any) -> int:
    """The tensors of a batch."""
    return _num_bytes(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _states(zero: Zero, optimizers: Iterable[Optimizer], config: ThreeDConfig) -> int:
    total = 0
    for optimizer in optimizers:
        num = num_states(optimizer)
        for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            shard = zero.shards.get(parameter)
            if shard is None or shard.is_elsewhere:
                continue
            total += shard.own(plain(parameter)).numel() * state_bytes(parameter, num, config)
    return total


def state_bytes(parameter: Tensor, num_states: int, config: ThreeDConfig) -> int:
    """Bytes of the optimizer states of each element of a parameter, with its master weight."""
    has_master = is_half(parameter) and config.precision.updates != "direct"
    return (num_states + 1) * _WIDE if has_master else num_states * parameter.itemsize


def _buffers(module: nn.Module, zero: Zero, config: ThreeDConfig, dp: int) -> int:
    """For collectives over the replicas."""
    if dp == 1:
        return 0
    if config.zero.stage < 3:
        num_bytes = bucket_bytes(zero.shards.values())
        return int(num_bytes if config.zero.bucket_size == "auto" else 2**20 * config.zero.bucket_size)
    units = (
        sum(parameter.numel() * parameter.element_size() for parameter in unit.parameters())
        for unit in module.modules()
        if isinstance(unit, FSDPModule) and unit is not module
    )
    return unit_buffers(units)


def unit_buffers(units: Iterable[int]) -> int:
    """Bytes for the collectives of FSDP2, given those of its units' parameters."""
    largest = sorted(units, reverse=True)
    return 2 * sum(largest[:1]) + sum(largest[:2])  # two units are whole at once, and gradients of one, twice


def _step(trained: Iterable[nn.Parameter], zero: Zero, device: torch.device) -> int:
    shards = [zero.shards[parameter].own(plain(parameter)) for parameter in trained if parameter in zero.shards]
    return optimizer_buffers([_WIDE * shard.numel() if is_half(shard) else shard.nbytes for shard in shards], device)


def optimizer_buffers(shards: Sequence[int], device: torch.device) -> int:
    """Bytes of an optimizer's results between its operators, given those of the shards that it steps, in fp32 if they
    are 16-bit: of one parameter on a CPU, else of all, as of ``foreach``.
    """
    return 2 * max(shards, default=0) if device.type == "cpu" else sum(shards)


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each once whatever its names; none of them overlap otherwise."""
    return sum({held.data_ptr(): held.nbytes for held in map(plain, tensors) if held.numel()}.values())
