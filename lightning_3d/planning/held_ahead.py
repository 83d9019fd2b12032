"""The memory that the ranks of a plan hold whatever they compute, from the plan alone: what `memory/held` measures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.device_memory import workspaces
from lightning_3d.distributed.mesh import num_sharing
from lightning_3d.memory.held import bytes_of, optimizer_buffers, state_bytes, unit_buffers
from lightning_3d.memory.rank_memory import HeldMemory
from lightning_3d.planning.plan import Plan
from lightning_3d.zero.buckets import bucket_bytes_of
from lightning_3d.zero.master_weights import is_half

_WIDE = 4  # bytes of a number of fp32


class HeldAhead:
    """The memory that the ranks of a plan hold.

    Args:
        module: The whole model; its weights may be on the meta device.
        num_states: Numbers that the optimizer keeps for each parameter.
    """

    def __init__(self, module: nn.Module, plan: Plan, config: ThreeDConfig, num_states: int) -> None:
        self._module, self._plan, self._config, self._num_states = module, plan, config, num_states
        zero = config.zero
        self.num_sharing = num_sharing(plan.shape, zero_stage=zero.stage, shard_size=zero.shard_size)
        """Ranks that share the training state of a replica's weights."""
        self._tp = {
            f"{block.fqn}.{weight.fqn}": plan.shape.tp
            for block in plan.blocks
            for weight in (() if block.tensor is None else block.tensor.weights)
            if weight.shard_dim is not None
        }

    def weights(self, pp_rank: int) -> int:
        """Bytes of the trained weights of a rank of the pp axis, before ZeRO."""
        return sum(num * parameter.itemsize for parameter, num in self._trained(pp_rank))

    @property
    def num_trained(self) -> list[int]:
        """How many parameters each rank of the pp axis trains."""
        return [len(list(self._trained(rank))) for rank in range(self._plan.shape.pp)]

    def of_rank(self, pp_rank: int, microbatch: Any, device: torch.device) -> HeldMemory:
        """The memory of a rank of the pp axis, on a device of this kind."""
        plan, zero, sharing = self._plan, self._config.zero, self.num_sharing
        trained = list(self._trained(pp_rank))
        whole = sum(num * p.itemsize for p, num in trained)
        gradients = whole
        if self._config.precision.updates != "direct":
            gradients += sum(num * p.itemsize for p, num in trained if is_half(p))  # they end in fp32
        states = sum(num * state_bytes(p, self._num_states, self._config) for p, num in trained)
        weights = sum(num * p.itemsize for p, num in self._present(pp_rank))
        buffers = sum(b.nbytes for fqn, b in self._module.named_buffers() if plan.holds(pp_rank, fqn))
        shards = [num * max(p.itemsize, _WIDE) // sharing for p, num in trained]
        return HeldMemory(
            weights=0 if zero.offload_params != "none" else weights // (sharing if zero.stage == 3 else 1) + buffers,
            gradients=gradients // sharing,
            optimizer_states=0 if zero.offload_optimizer != "none" else states // sharing,
            batch=self._config.num_microbatches * bytes_of(microbatch),
            communication=self._buffers(pp_rank, whole),
            workspaces=workspaces(device),
            step=optimizer_buffers(shards, device),
        )

    def _buffers(self, pp_rank: int, whole: int) -> int:
        """Buffers of collectives over the replicas."""
        if self._plan.shape.dp == 1:
            return 0
        if self._config.zero.stage < 3:
            size = self._config.zero.bucket_size
            return int(bucket_bytes_of(whole) if size == "auto" else 2**20 * size)
        return unit_buffers(self._of_block(block.fqn) for block in self._plan.blocks_on(pp_rank))

    def _of_block(self, fqn: str) -> int:
        block = self._module.get_submodule(fqn)
        return sum(p.nbytes // self._tp.get(f"{fqn}.{name}", 1) for name, p in block.named_parameters())

    def _trained(self, pp_rank: int) -> Iterator[tuple[nn.Parameter, int]]:
        return ((parameter, num) for parameter, num in self._present(pp_rank) if parameter.requires_grad)

    def _present(self, pp_rank: int) -> Iterator[tuple[nn.Parameter, int]]:
        """The parameters of a rank, and how many elements of each are its own before ZeRO."""
        for fqn, parameter in self._module.named_parameters():
            if self._plan.holds(pp_rank, fqn):
                yield parameter, -(-parameter.numel() // self._tp.get(fqn, 1))


def least_held(module: nn.Module, config: ThreeDConfig, num_states: int, *, pieces: int, dp: int, stage: int) -> int:
    """Bytes of weights, gradients and optimizer states of a rank, where the model is cut into equal pieces.

    Args:
        stage: Of ZeRO.
    """
    weights = sum(parameter.nbytes for parameter in module.parameters())
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    further = sum(p.nbytes + p.numel() * state_bytes(p, num_states, config) for p in trained)
    return (weights // (dp if stage == 3 else 1) + further // (dp if stage else 1)) // pieces
