"""Runs of one block on fake tensors, forward and backward, which show the memory that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d.planning.loads import Inputs
from lightning_3d.planning.memory.live_bytes import LiveBytes
from lightning_3d.tensor.plan.planned_forward import PlannedForward
from lightning_3d.torch_internals.autograd import is_cast_of_leaf
from lightning_3d.torch_internals.pipelining import begin_split_backward, splittable
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.trace.fake_blocks import with_state
from lightning_3d.trace.ghost import TensorMeta

T = TypeVar("T")

_Forward = Callable[[], list[Any]]
"""Runs a block; returns the leaves of its output."""


@dataclass(frozen=True, kw_only=True)
class InnerStorage:
    """A storage that a block makes and does not return."""

    num_bytes: int
    is_saved: bool
    """Whether autograd keeps it for the backward."""
    is_costly: bool
    """Whether selective recomputation keeps it."""
    is_cast: bool
    """Whether it is the copy that autocast made of a weight."""


@dataclass(frozen=True, kw_only=True)
class KeptStorages:
    """The storages that autograd and recomputation keep for one call of a block, beside weights."""

    inputs: frozenset[int]
    """Positions among the flat arguments, of those that autograd keeps."""
    outputs: frozenset[int]
    """The same among the leaves of the output."""
    inner: tuple[InnerStorage, ...]


class BlockRun:
    """Runs of a block, inside of a mode of fake tensors.

    Args:
        inputs: Of a call.
        device: Where it would run.
        forward: That of a tensor-parallel plan; None: the block's own with whole weights.
    """

    def __init__(
        self, block: nn.Module, inputs: Inputs, device: torch.device, forward: PlannedForward | None = None
    ) -> None:
        self._block, self._inputs, self._device, self._planned = block, inputs, device, forward
        parameters = dict(block.named_parameters(remove_duplicate=False))
        made = {p: self._made_parameter(fqn, p) for fqn, p in parameters.items()}
        self._parameters = {fqn: made[p] for fqn, p in parameters.items()}
        self._buffers = {name: torch.empty_like(b, device=device) for name, b in block.named_buffers()}

    def alone(self) -> int:
        """The peak of a forward without autograd."""

        def run(forward: _Forward, arguments: list[Any]) -> int:
            bytes_ = LiveBytes()
            with bytes_:
                forward()
                return bytes_.peak

        with torch.no_grad():
            return self._with_forward(run)

    def whole(self) -> tuple[int, int, int]:
        """The peak of a forward, the bytes of its cheap results, and the peak of its backward."""

        def run(forward: _Forward, arguments: list[Any]) -> tuple[int, int, int]:
            bytes_ = LiveBytes()
            with bytes_:
                outputs = _differentiable(forward())
                peak, cheap, before = bytes_.peak, bytes_.num_cheap, bytes_.restart()
                if outputs:
                    gradients = [torch.empty_like(output) for output in outputs]
                    torch.autograd.backward(outputs, gradients)
                return peak, cheap, bytes_.peak - before

        return self._with_forward(run)

    def split(self) -> tuple[int, int, int] | None:
        """The peak of a backward of inputs alone, what that leaves for the weights, and the peak of the rest.

        None where it can't be split.
        """

        def run(forward: _Forward, arguments: list[Any]) -> tuple[int, int, int] | None:
            bytes_ = LiveBytes()
            with bytes_:
                received = _differentiable(arguments)
                outputs = list(splittable(_differentiable(forward()), received))
                before, weights = bytes_.restart(), [p for p in self._parameters.values() if p.requires_grad]
                if not outputs or not received:
                    return None
                gradients = [torch.empty_like(output) for output in outputs]
                end = begin_split_backward(outputs, gradients, received, weights)
                del gradients
                of_inputs = bytes_.peak - before
                held = bytes_.restart() - before
                end()
                return of_inputs, max(held, 0), max(bytes_.peak - before - held, 0)

        try:
            return self._with_forward(run, leaves=True)
        except Exception:  # of torch, or of a block that changes its input, a leaf here
            return None

    def kept(self) -> KeptStorages:
        """The storages between the forward and the backward."""

        def run(forward: _Forward, arguments: list[Any]) -> KeptStorages:
            bytes_, saved, casts = LiveBytes(), set[StorageWeakRef](), set[StorageWeakRef]()

            def note(tensor: Tensor) -> Tensor:
                saved.add(StorageWeakRef(tensor.untyped_storage()))
                if is_cast_of_leaf(tensor):
                    casts.add(StorageWeakRef(tensor.untyped_storage()))
                return tensor

            with bytes_, saved_tensors_hooks(note, lambda tensor: tensor):
                outputs = forward()
            alive, returned = set(bytes_.alive), {_storage(leaf) for leaf in outputs}
            inner = [
                InnerStorage(
                    num_bytes=size,
                    is_saved=storage in alive,
                    is_costly=storage in bytes_.costly,
                    is_cast=storage in casts,
                )
                for storage, size in bytes_.sizes.items()
                if storage not in returned
            ]
            return KeptStorages(
                inputs=frozenset(i for i, leaf in enumerate(arguments) if _storage(leaf) in saved),
                outputs=frozenset(i for i, leaf in enumerate(outputs) if _storage(leaf) in saved),
                inner=tuple(storage for storage in inner if storage.is_saved or storage.is_costly),
            )

        return self._with_forward(run)

    def _with_forward(self, run: Callable[[_Forward, list[Any]], T], *, leaves: bool = False) -> T:
        def call(own: Callable[..., Any]) -> T:
            args, kwargs = tree_map(lambda leaf: self._made(leaf, is_leaf=leaves), self._inputs)

            def forward() -> list[Any]:
                return tree_leaves(own(*args, **kwargs) if planned is None else planned.run(own, args, kwargs))

            return run(forward, tree_leaves((args, kwargs)))

        planned = self._planned
        parameters = self._parameters if planned is None else planned.found(self._parameters)
        return with_state(self._block, {**parameters, **self._buffers}, call)

    def _made(self, leaf: Any, *, is_leaf: bool) -> Any:
        if not isinstance(leaf, TensorMeta):
            return leaf
        made = torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device).requires_grad_(leaf.requires_grad)
        return made if is_leaf else made.clone()  # a leaf of autograd can't be changed in place

    def _made_parameter(self, fqn: str, parameter: nn.Parameter) -> Tensor:
        shape = parameter.shape if self._planned is None else self._planned.shape_of(fqn, parameter.shape)
        made = torch.empty(shape, dtype=parameter.dtype, device=self._device).requires_grad_(parameter.requires_grad)
        if made.requires_grad:
            made.grad = torch.empty_like(made)
        return made


def _differentiable(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _storage(leaf: Any) -> StorageWeakRef | None:
    return StorageWeakRef(leaf.untyped_storage()) if isinstance(leaf, Tensor) else None
