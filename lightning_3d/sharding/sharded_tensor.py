"""`ShardedTensor`, the one form in which a block's code meets a tensor of which this rank has a part."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import InterleavedShard, Shard, Sharded, full_shape
from lightning_3d.torch_internals.modules import TORCH_ATTRIBUTES
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import make_wrapper, no_torch_function, set_gradient_hooks

UNSEEN = (
    "a sharded activation was used where the calls of shards are not seen: by code that bypasses torch's function "
    "modes, or after the block's forward"
)


@dataclass(frozen=True, slots=True)
class SourceWeights:
    """The weights that a tensor's sharding comes from, as planning follows them."""

    sources: frozenset[str]
    """FQNs of column weights."""

    start: int = 0
    """The output feature of the weight with which the sharded dim begins."""


class ShardedTensor(Tensor):
    """A tensor of the full shape, with this rank's part as a plain local tensor.

    `interpret` answers the calls of user code with it. Autograd follows the local tensors alone: neither this class nor
    DTensor takes part, which makes a block's local work as fast as that of layers written by hand.

    Args:
        local: This rank's part, with its autograd history.
        axis: The axis that it is sharded over.
        placement: The sharded dim.
        is_weight: Whether it is a parameter or was made of one, and is multiplied with as one.

    Raises:
        PlanError: torch itself, not `interpret`, computes with it or hands it a gradient.
    """

    local: Tensor
    axis: Axis
    placement: Sharded

    is_weight: bool

    source_weights: SourceWeights | None = None
    """Set while planning."""

    answer_after_block: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Answers operators without gradients after a block's forward, as where beam search reorders what blocks cached."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # as DTensor has it

    @staticmethod
    def __new__(cls, local: Tensor, axis: Axis, placement: Sharded, *, is_weight: bool = False) -> ShardedTensor:
        shape = full_shape(local.shape, placement, axis.size)
        sharded = make_wrapper(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)
        sharded.local, sharded.axis, sharded.placement, sharded.is_weight = local, axis, placement, is_weight
        if local.requires_grad:
            set_gradient_hooks(sharded, _REFUSES)
        return sharded

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # of saved tensors, as a checkpoint inside of a block makes them
            (sharded,) = args
            local = sharded.local.detach().requires_grad_(sharded.local.requires_grad)
            return ShardedTensor(local, sharded.axis, sharded.placement, is_weight=sharded.is_weight)
        if torch.is_grad_enabled():
            raise PlanError(f"{UNSEEN} ({func})")
        return cls.answer_after_block(func, args, kwargs or {})

    def own(self) -> Tensor:
        """The local tensor."""
        if self.grad_fn is not None:  # the result of an autograd function: `local` lacks that part of the history
            raise PlanError(f"{UNSEEN} ({self.grad_fn.name()})")
        return self.local

    def follow_local(self) -> None:
        """After the local tensor was changed in place: it may need a gradient now."""
        if self.local.requires_grad and not self.requires_grad:
            self.requires_grad_()
            set_gradient_hooks(self, _REFUSES)


def placement_of(tensor: object) -> Sharded | None:
    """How a sharded tensor lies; None for a plain one, and for what is no tensor."""
    return tensor.placement if isinstance(tensor, ShardedTensor) else None


def shard_dim(tensor: object) -> int | None:
    """The dim that a tensor is evenly sharded on; None for a plain tensor or any other placement."""
    placement = placement_of(tensor)
    return placement.dim if type(placement) is Shard and placement.lengths is None else None


def cut_dim(tensor: object) -> int | None:
    """The dim that a tensor is sharded on, evenly or not; None for a plain tensor, and for one in parts."""
    placement = placement_of(tensor)
    return placement.dim if type(placement) is Shard else None


def parts_of(tensor: object) -> InterleavedShard | None:
    """The parts of a tensor that has them; None for any other."""
    placement = placement_of(tensor)
    return placement if type(placement) is InterleavedShard else None


def change_kept(
    attributes: dict[str, Any], change: Callable[[Any], Any], kinds: tuple[type[Tensor], ...] = (ShardedTensor,)
) -> None:
    """Change the leaves of those attributes of a module that are, or hold, sharded tensors, or tensors of `kinds`."""
    for name, value in attributes.items():
        if name not in TORCH_ATTRIBUTES and _holds(value, kinds):
            attributes[name] = tree_map(change, value)


def _holds(value: object, kinds: tuple[type[Tensor], ...]) -> bool:
    if isinstance(value, Tensor):
        return isinstance(value, kinds)
    if not isinstance(value, list | tuple | dict):
        return False
    return any(isinstance(leaf, kinds) for leaf in tree_leaves(value))


def _refuse(gradient: Tensor) -> None:
    raise PlanError(UNSEEN)


_REFUSES: Mapping[int, Callable[[Tensor], None]] = OrderedDict({0: _refuse})
