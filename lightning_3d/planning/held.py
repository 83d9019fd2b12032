"""The memory that the ranks of a plan hold whatever they compute: weights, gradients, optimizer states, buffers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.device_memory import workspaces
from lightning_3d.distributed.mesh import num_sharing
from lightning_3d.memory.rank_memory import StaticMemory
from lightning_3d.planning.plan import Plan
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.buckets import bucket_bytes_of
from lightning_3d.zero.master_weights import is_half

_WIDE = 4  # bytes of a number of fp32


class StateShapes:
    """The parameters and buffers of a model as they are before ranks take their parts: shapes and dtypes, no data.

    Args:
        module: The whole model; its weights may be on the meta device.
    """

    def __init__(self, module: nn.Module) -> None:
        metas: dict[Tensor, Tensor] = {}
        self.parameters: dict[str, Tensor] = {}
        """FQN -> parameter on the meta device, under every name that it has."""
        self.buffers: dict[str, int] = {}
        """FQN -> bytes, of each buffer once."""
        for fqn, tensor, _ in named_state(module):
            is_parameter = isinstance(tensor, nn.Parameter)
            if tensor not in metas:
                metas[tensor] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                metas[tensor].requires_grad_(tensor.requires_grad)
                self.buffers |= {} if is_parameter else {fqn: tensor.nbytes}
            if is_parameter:
                self.parameters[fqn] = metas[tensor]


class PlannedStaticMemory:
    """The memory that the ranks of a plan hold.

    Args:
        num_states: Numbers that the optimizer keeps for each parameter.
    """

    def __init__(self, shapes: StateShapes, plan: Plan, config: ThreeDConfig, num_states: int) -> None:
        self._shapes, self._plan, self._config, self._num_states = shapes, plan, config, num_states
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

    def of_ranks(self, microbatch: Any, device: torch.device) -> list[StaticMemory]:
        """The memory of each rank of the pp axis, on a device of this kind."""
        return [self._of_rank(pp_rank, microbatch, device) for pp_rank in range(self._plan.shape.pp)]

    def _of_rank(self, pp_rank: int, microbatch: Any, device: torch.device) -> StaticMemory:
        plan, zero, sharing = self._plan, self._config.zero, self.num_sharing
        trained = list(self._trained(pp_rank))
        whole = sum(num * p.itemsize for p, num in trained)
        gradients = whole
        if self._config.precision.updates != "direct":
            gradients += sum(num * p.itemsize for p, num in trained if is_half(p))  # they end in fp32
        states = sum(num * _state_bytes(p, self._num_states, self._config) for p, num in trained)
        weights = sum(num * p.itemsize for p, num in self._present(pp_rank))
        buffers = sum(num_bytes for fqn, num_bytes in self._shapes.buffers.items() if plan.holds(pp_rank, fqn))
        shards = [num * max(p.itemsize, _WIDE) // sharing for p, num in trained]
        return StaticMemory(
            weights=0 if zero.offload_params != "none" else weights // (sharing if zero.stage == 3 else 1) + buffers,
            gradients=gradients // sharing,
            optimizer_states=0 if zero.offload_optimizer != "none" else states // sharing,
            batch=self._config.num_microbatches * bytes_of(microbatch),
            communication=self._buffers(pp_rank, whole),
            workspaces=workspaces(device),
            # Results between an optimizer's operators: of one parameter on a CPU, else of all, as of `foreach`.
            step=2 * max(shards, default=0) if device.type == "cpu" else sum(shards),
        )

    def _buffers(self, pp_rank: int, whole: int) -> int:
        """Buffers of collectives over the replicas."""
        if self._plan.shape.dp == 1:
            return 0
        if self._config.zero.stage < 3:
            size = self._config.zero.bucket_size
            return int(bucket_bytes_of(whole) if size == "auto" else 2**20 * size)
        units = sorted((self._of_block(block.fqn) for block in self._plan.blocks_on(pp_rank)), reverse=True)
        return 2 * sum(units[:1]) + sum(units[:2])  # two units are whole at once, and gradients of one, twice

    def _of_block(self, fqn: str) -> int:
        own = {name: p for name, p in self._shapes.parameters.items() if name.startswith(f"{fqn}.")}
        return sum({p: p.nbytes // self._tp.get(name, 1) for name, p in own.items()}.values())

    def _trained(self, pp_rank: int) -> Iterator[tuple[Tensor, int]]:
        return ((parameter, num) for parameter, num in self._present(pp_rank) if parameter.requires_grad)

    def _present(self, pp_rank: int) -> Iterator[tuple[Tensor, int]]:
        """The parameters of a rank, and how many elements of each are its own before ZeRO."""
        seen = set[Tensor]()
        for fqn, parameter in self._shapes.parameters.items():
            if parameter not in seen and self._plan.holds(pp_rank, fqn):
                seen.add(parameter)
                yield parameter, -(-parameter.numel() // self._tp.get(fqn, 1))


def bytes_of(batch: Any) -> int:
    """The tensors of a batch."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _state_bytes(parameter: Tensor, num_states: int, config: ThreeDConfig) -> int:
    """Bytes of the optimizer states of each element of a parameter, with its master weight."""
    has_master = is_half(parameter) and config.precision.updates != "direct"
    return (num_states + 1) * _WIDE if has_master else num_states * parameter.itemsize


def least_held(module: nn.Module, config: ThreeDConfig, num_states: int, *, pieces: int, dp: int, stage: int) -> int:
    """Bytes of weights, gradients and optimizer states of a rank, where the model is cut into equal pieces.

    Args:
        stage: Of ZeRO.
    """
    weights = sum(parameter.nbytes for parameter in module.parameters())
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    further = sum(p.nbytes + p.numel() * _state_bytes(p, num_states, config) for p in trained)
    return (weights // (dp if stage == 3 else 1) + further // (dp if stage else 1)) // pieces
