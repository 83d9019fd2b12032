"""The cost of one call of a block, measured by a forward and a backward on fake tensors: bytes, and time in operations.

A block of each kind is measured once. Nothing is computed and nothing of it stays.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.activations.collective_mode import CollectiveMode
from lightning_3d.activations.selective import is_costly
from lightning_3d.config.activations import Mode
from lightning_3d.distributed.machine import Work
from lightning_3d.distributed.rng import random_states_kept
from lightning_3d.memory.flop_counter import flops_of
from lightning_3d.model.kinds import kind_of
from lightning_3d.model.snapshot import preserved
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.plan.planned_forward import PlannedForward
from lightning_3d.torch_internals.autograd import is_cast_of_leaf
from lightning_3d.torch_internals.dispatch import Operator
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode, on_fake_tensors
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves, tree_map
from lightning_3d.trace.fake_blocks import with_state
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Trace

T = TypeVar("T")

Inputs = tuple[Args, Kwargs]
"""Arguments and keyword arguments of a block, with a ``TensorMeta`` in place of each tensor."""


FLOPS_PER_BYTE = 32
"""Operations of a device while it writes a byte, about; weighs products of matrices against other operators."""


@dataclass(frozen=True, kw_only=True)
class BlockCost:
    """The cost of one call on one rank, in bytes unless said otherwise; "inside" excludes its inputs and outputs."""

    saved: int
    """Kept inside for the backward."""
    costly: int
    """Kept inside where the block is recomputed selectively."""
    casts: int
    """Copies that autocast makes of weights."""
    returned: int
    forward: int
    """Peak of the forward."""
    forward_alone: int
    """The same without autograd."""
    backward: int
    """Peak of the backward above what the forward had kept."""
    full_time: int
    """Operations of another forward."""
    selective_time: int
    """The same but for its costly operators."""
    time: int
    """Operations of the forward and the backward."""
    flops: int = 0
    """The part of ``time`` that is products; the rest stands for the bytes that operators write."""
    num_calls: int = 0
    """Operators in the forward and the backward."""

    @property
    def work(self) -> Work:
        """The forward and the backward."""
        return Work(flops=self.flops, written=(self.time - self.flops) / FLOPS_PER_BYTE, calls=self.num_calls)

    def kept(self, mode: Mode) -> int:
        """Kept inside between forward and backward."""
        return {"none": self.saved, "selective": self.costly, "full": 0}[mode]

    def recomputation(self, mode: Mode) -> int:
        """Operations that recomputing it takes."""
        return {"none": 0, "selective": self.selective_time, "full": self.full_time}[mode]

    def divided(self, number: int) -> BlockCost:
        """That of each of a number of ranks that share the block's weights, about; outputs are whole."""
        parts = {name: value // number for name, value in vars(self).items()}
        whole = self.returned - self.returned // number
        parts |= {name: parts[name] + whole for name in ("forward", "forward_alone", "backward", "returned")}
        return BlockCost(**parts)

    def of_slice(self, number: int, given: int) -> BlockCost:
        """That of each of a number of ranks that share out the sequence, about: all but its weights and its calls.

        Args:
            given: Bytes of the activation that it gets: as many as attention gives, which is kept on both sides of its
                way back to slices.
        """
        parts = {name: -(-value // number) for name, value in vars(self).items()}
        saved = parts["saved"] + (given // number if parts["saved"] else 0)
        return BlockCost(**{**parts, "saved": saved, "casts": self.casts, "num_calls": self.num_calls})


def block_costs(
    blocks: Mapping[str, nn.Module],
    trace: Trace,
    device: torch.device,
    tensors: Mapping[str, BlockTensorPlan] | None = None,
) -> dict[str, BlockCost | None]:
    """Measure the blocks that a trace calls; FQN -> cost, None for a block whose forward needs data.

    Args:
        device: Where they would run.
        tensors: Block FQN -> how its weights are sharded, of those that are.
    """
    measured: dict[Hashable, BlockCost | None] = {}
    costs = {}
    for fqn, inputs in trace.block_inputs.items():
        tensor = (tensors or {}).get(fqn)
        kind = (kind_of(blocks[fqn]), repr(inputs), tensor)
        if kind not in measured:
            measured[kind] = _cost_of_rank(blocks[fqn], inputs, device, tensor)
        costs[fqn] = measured[kind]
    return costs


def _cost_of_rank(
    block: nn.Module, inputs: Inputs, device: torch.device, tensor: BlockTensorPlan | None
) -> BlockCost | None:
    """That of one tensor-parallel rank; where its own forward can't be run, a share of the whole block's."""
    if tensor is not None and not tensor.has_vocabulary:
        with suppress(Exception):
            return block_cost(block, inputs, device, PlannedForward(tensor))
    with suppress(Exception):
        cost = block_cost(block, inputs, device)
        return cost if tensor is None else cost.divided(tensor.size)
    return None


def block_cost(
    block: nn.Module, inputs: Inputs, device: torch.device, planned: PlannedForward | None = None
) -> BlockCost:
    """Run a block on fake tensors, forward alone, and forward and backward.

    Args:
        inputs: Of a call.
        device: Where it would run.
        planned: To measure one tensor-parallel rank, whose weights are not sharded over the vocabulary.

    Raises:
        Exception: of the block, which can't run without data.
    """

    def made(leaf: object) -> object:
        if not isinstance(leaf, TensorMeta):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device=device).requires_grad_(leaf.requires_grad)
        return tensor.clone()  # a leaf of autograd can't be changed in place

    def run(measure: Callable[[Callable[[], list[object]]], object]) -> Any:
        parameters = _parameters(block, device, planned)
        if planned is not None:
            parameters = planned.found(parameters)
        buffers = {name: torch.empty_like(buffer, device=device) for name, buffer in block.named_buffers()}

        def call(own: Callable[..., object]) -> object:
            args, kwargs = tree_map(made, inputs)
            return measure(
                lambda: tree_leaves(own(*args, **kwargs) if planned is None else planned.run(own, args, kwargs))
            )

        return with_state(block, {**parameters, **buffers}, call)

    fakes = on_fake_tensors(FakeTensorMode(allow_non_fake_inputs=True))
    with random_states_kept(), preserved(block), torch.inference_mode(False), fakes:
        with torch.no_grad():
            alone: _LiveBytes = run(_forward_alone)
        with torch.enable_grad():
            cost: BlockCost = run(_forward_and_backward)
    return replace(cost, forward_alone=alone.peak, full_time=alone.flops + cost.selective_time)


def _parameters(block: nn.Module, device: torch.device, planned: PlannedForward | None) -> dict[str, Tensor]:
    """Stand-ins for the parameters on one rank, with gradients; ties stay ties."""
    made: dict[nn.Parameter, Tensor] = {}
    found = dict(block.named_parameters(remove_duplicate=False))
    for fqn, parameter in found.items():
        shape = parameter.shape if planned is None else planned.shape_of(fqn, parameter.shape)
        if parameter not in made:
            fake = torch.empty(shape, dtype=parameter.dtype, device=device).requires_grad_(parameter.requires_grad)
            fake.grad = torch.empty_like(fake) if fake.requires_grad else None
            made[parameter] = fake
    return {fqn: made[parameter] for fqn, parameter in found.items()}


def _forward_alone(forward: Callable[[], list[object]]) -> _LiveBytes:
    live = _LiveBytes()
    with live:
        forward()
    return live


def _forward_and_backward(forward: Callable[[], list[object]]) -> BlockCost:
    """All but what a forward alone tells."""
    casts = set[StorageWeakRef]()

    def note(tensor: Tensor) -> Tensor:
        if is_cast_of_leaf(tensor):
            casts.add(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    with _LiveBytes() as live:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = [leaf for leaf in forward() if isinstance(leaf, Tensor)]
        returned = {StorageWeakRef(output.untyped_storage()) for output in outputs}
        peak, before, kept = live.peak, live.restart(), set(live.alive)
        cheap, costly = live.num_cheap, live.costly - returned
        differentiable = [output for output in outputs if output.requires_grad]
        if differentiable:
            torch.autograd.backward(differentiable, [torch.empty_like(output) for output in differentiable])
        return BlockCost(
            saved=live.num_bytes(kept - returned - casts),
            costly=live.num_bytes(costly),
            casts=live.num_bytes(casts & kept),
            returned=live.num_bytes(returned & live.sizes.keys()),
            forward=peak,
            forward_alone=0,
            backward=live.peak - before,
            full_time=0,
            selective_time=FLOPS_PER_BYTE * cheap,
            time=live.flops + FLOPS_PER_BYTE * sum(live.sizes.values()),
            flops=live.flops,
            num_calls=live.num_calls,
        )


class _LiveBytes(CollectiveMode):
    """Follows the storages that operators make inside, fake ones too."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        """Bytes of all that were made; references keep the addresses of those that are gone from being used again."""
        self.costly: set[StorageWeakRef] = set()
        """Results of operators and collectives that selective recomputation keeps."""
        self.num_calls = self.flops = 0
        self.alive: set[StorageWeakRef] = set()
        """Storages that are not freed, as of the last look."""
        self._used_up: set[StorageWeakRef] = set()
        self._live = 0  # bytes alive, with those freed since the last look
        self.peak = 0
        """Bytes that were alive at once, at most, since `restart`."""

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        self.num_calls += 1
        given = _storages((args, kwargs))
        results = func(*args, **(kwargs or {}))
        self.flops += flops_of(func, args, kwargs or {}, results)
        for storage, num_bytes in _storages(results).items():
            if storage in given or storage in self.sizes:
                continue
            self.sizes[storage] = num_bytes
            self.alive.add(storage)
            self._live += num_bytes
            if is_costly(func):
                self.costly.add(storage)
        if self._live > self.peak:  # to look takes as long as storages are many
            self.peak = max(self.peak, self._look())
        return results

    def on_collective(self, make: Callable[[], T], donated: Tensor | None) -> T:
        """Note that the result is kept, and what it used up is not, nor computed again."""
        storage = None if donated is None else StorageWeakRef(donated.untyped_storage())
        result = make()
        if donated is not None and storage in self.costly and self.sizes[storage] == donated.nbytes:
            self.costly.remove(storage)
            self._used_up.add(storage)
        self.costly.update(_storages(result))
        return result

    def num_bytes(self, storages: set[StorageWeakRef]) -> int:
        """The size of storages made inside."""
        return sum(self.sizes[storage] for storage in storages)

    @property
    def num_cheap(self) -> int:
        """Bytes of all results that selective recomputation computes again."""
        return self.num_bytes(self.sizes.keys() - self.costly - self._used_up)

    def restart(self) -> int:
        """Begin to look for the peak anew; returns the bytes that are alive."""
        self.peak = self._look()
        return self.peak

    def _look(self) -> int:
        freed = {storage for storage in self.alive if storage.expired()}
        self.alive -= freed
        self._live -= self.num_bytes(freed)
        return self._live


def _storages(tree: object) -> dict[StorageWeakRef, int]:
    """The storages of its tensors -> bytes."""
    tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}
