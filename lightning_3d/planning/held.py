"""The memory that the ranks of a plan hold whatever they compute: weights, gradients, optimizer states, buffers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.device_memory import workspaces
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.rank_memory import StaticMemory
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.shares import num_shards, num_sharing_of
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.buckets import bucket_bytes_of
from lightning_3d.zero.master_weights import is_half
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.owners import bytes_received

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


class StateMemory:
    """The memory that ranks hold whatever they compute, by where state and blocks lie.

    Args:
        state_places: From `place_state`: by ranks of the pp axis, or by calls of which a stage may be made.
        block_places: FQN of a block -> the same.
        tensors: FQN of a block -> how its weights are sharded.
        num_states: Numbers that the optimizer keeps for each parameter.
    """

    def __init__(
        self,
        shapes: StateShapes,
        state_places: Mapping[str, Collection[int]],
        block_places: Mapping[str, Collection[int]],
        tensors: Mapping[str, BlockTensorPlan],
        config: ThreeDConfig,
        shape: MeshShape,
        num_states: int,
    ) -> None:
        self._shapes, self._block_places = shapes, block_places
        self._config, self._shape, self.num_states = config, shape, num_states
        self.num_sharing = num_sharing_of(config.zero, shape)
        """Ranks that share the training state of a replica's weights."""
        self._tp = {
            f"{fqn}.{weight}": num for fqn, tensor in tensors.items() for weight, num in num_shards(tensor).items()
        }
        first = dict[Tensor, str]()  # parameter -> one of its names, which lie at the same places
        for fqn, parameter in shapes.parameters.items():
            first.setdefault(parameter, fqn)
        self._state = [(p, -(-p.numel() // self._tp.get(fqn, 1)), state_places.get(fqn)) for p, fqn in first.items()]
        """Each parameter, how many elements of it are a rank's own before ZeRO, and where it lies; None: everywhere."""
        self._buffer_bytes = [(num_bytes, state_places.get(fqn)) for fqn, num_bytes in shapes.buffers.items()]

    @classmethod
    def of_plan(cls, shapes: StateShapes, plan: Plan, config: ThreeDConfig, num_states: int) -> StateMemory:
        """That of the ranks of a plan."""
        ranks = {block.fqn: plan.ranks_of(block) for block in plan.blocks}
        return cls(shapes, plan.state_ranks, ranks, plan.tensors, config, plan.shape, num_states)

    def of_ranks(self, microbatch: object, device: torch.device) -> list[StaticMemory]:
        """The memory of each rank of the pp axis, on a device of this kind."""
        return [self.at({pp_rank}, microbatch, device) for pp_rank in range(self._shape.pp)]

    def at(self, places: Set[int], microbatch: Any, device: torch.device) -> StaticMemory:
        """That of a rank on which all lies that lies at one of these places."""
        zero, sharing = self._config.zero, self.num_sharing
        of_weights = num_sharing_of(zero, self._shape, of_weights=True)
        present = self._present(places)
        trained = [(parameter, num) for parameter, num in present if parameter.requires_grad]
        whole = sum(num * p.itemsize for p, num in trained)
        gradients = whole
        if self._config.precision.updates != "direct":
            gradients += sum(num * p.itemsize for p, num in trained if is_half(p))  # they end in fp32
        states = sum(num * _state_bytes(p, self.num_states, self._config) for p, num in trained)
        weights = sum(num * p.itemsize for p, num in present)
        buffers = sum(n for n, of_state in self._buffer_bytes if of_state is None or not places.isdisjoint(of_state))
        shards = [num * max(p.itemsize, _WIDE) // sharing for p, num in trained]
        return StaticMemory(
            weights=0 if zero.offload_params != "none" else weights // of_weights + buffers,
            gradients=gradients // sharing,
            optimizer_states=0 if zero.offload_optimizer != "none" else states // sharing,
            batch=self._config.num_microbatches * bytes_of(microbatch),
            communication=self._buffers(places, whole),
            workspaces=workspaces(device),
            # Results between an optimizer's operators: of one parameter on a CPU, else of all, as of `foreach`.
            step=2 * max(shards, default=0) if device.type == "cpu" else sum(shards),
        )

    @property
    def gathers_again(self) -> bool:
        """Whether ZeRO-3 gathers parameters for the backward again."""
        return not self._config.zero.keeps_gathered(is_microbatched=self._shape.pp > 1)

    @property
    def weights(self) -> list[int]:
        """Bytes of the trained weights of each rank of the pp axis, before ZeRO."""
        ranks = range(self._shape.pp)
        return [sum(num * parameter.itemsize for parameter, num in self._trained({rank})) for rank in ranks]

    @property
    def num_trained(self) -> list[int]:
        """How many parameters each rank of the pp axis trains."""
        return [len(self._trained({rank})) for rank in range(self._shape.pp)]

    def received_for_steps(self, kind: OptimizerKind, pp_rank: int) -> int:
        """Bytes that a rank receives for a step of an optimizer that needs more than its parts, in the mean."""
        replicas = num_sharing_of(self._config.zero, self._shape, of_weights=True)
        ranks = replicas * self._shape.model_size
        received = 0.0
        if kind == "all":
            trained = [p.nbytes for p, _, _ in self._state if p.requires_grad]
            received = sum(bytes_received(size, ranks, has_owner=False) for size in trained)
        elif kind == "parameters":
            cuts = [(p.nbytes, replicas * round(p.numel() / num)) for p, num in self._trained({pp_rank}) if num]
            received = sum(bytes_received(size, num_cuts, has_owner=True) for size, num_cuts in cuts)
        return round(received)

    def _buffers(self, places: Set[int], whole: int) -> int:
        """Buffers of collectives over the ranks that have the same weights."""
        if self._shape.size("state") == 1:
            return 0
        if self._config.zero.stage < 3:
            size = self._config.zero.bucket_size
            return int(bucket_bytes_of(whole) if size == "auto" else 2**20 * size)
        present = (fqn for fqn, of_block in self._block_places.items() if not places.isdisjoint(of_block))
        units = sorted(map(self._of_block, present), reverse=True)
        return 2 * sum(units[:1]) + sum(units[:2])  # two units are whole at once, and gradients of one, twice

    def _of_block(self, fqn: str) -> int:
        own = {name: p for name, p in self._shapes.parameters.items() if name.startswith(f"{fqn}.")}
        return sum({p: p.nbytes // self._tp.get(name, 1) for name, p in own.items()}.values())

    def _present(self, places: Set[int]) -> list[tuple[Tensor, int]]:
        """The parameters at some places, and how many elements of each are a rank's own before ZeRO."""
        return [(p, num) for p, num, of_state in self._state if of_state is None or not places.isdisjoint(of_state)]

    def _trained(self, places: Set[int]) -> list[tuple[Tensor, int]]:
        return [(parameter, num) for parameter, num in self._present(places) if parameter.requires_grad]


def bytes_of(batch: object) -> int:
    """The tensors of a batch."""
    return sum(leaf.nbytes for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))


def _state_bytes(parameter: Tensor, num_states: int, config: ThreeDConfig) -> int:
    """Bytes of the optimizer states of each element of a parameter, with its master weight."""
    has_master = is_half(parameter) and config.precision.updates != "direct"
    return (num_states + 1) * _WIDE if has_master else num_states * parameter.itemsize


def least_held(module: nn.Module, config: ThreeDConfig, num_states: int, *, shape: MeshShape) -> int:
    """Bytes of weights, gradients and optimizer states of a rank, where the model is cut into equal pieces."""
    state = StateMemory(StateShapes(module), {}, {}, {}, config, shape, num_states)
    held = state.at(frozenset(), None, torch.device("cpu"))
    return (held.weights + held.gradients + held.optimizer_states) // shape.model_size
