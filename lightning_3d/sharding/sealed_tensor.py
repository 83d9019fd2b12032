"""A sharded tensor as the interpreter of another axis meets it: plain, and of the full shape.

Where a block's features are cut over one axis and its sequences over another, two interpreters are active. A handle is
one only to the interpreter of its own axis. The inner one answers first; what it runs on its shards goes on to the
outer one, which opens what is sealed, and seals its results again.

    inner:  ShardedTensor (B, T, D), whose local tensor is
    outer:  a SealedTensor (B, T, D / 2) around
            a ShardedTensor (B, T, D / 2), whose local tensor is
            a plain one (B, T / 2, D / 2)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import PlanError
from lightning_3d.sharding.sharded_tensor import UNSEEN, ShardedTensor
from lightning_3d.torch_internals.dispatch import DisableTorchFunction
from lightning_3d.torch_internals.tensors import make_wrapper, no_torch_function


class SealedTensor(Tensor):
    """Stands for a sharded tensor; made by `sealed`.

    Raises:
        PlanError: torch itself computes with it.
    """

    sharded: ShardedTensor

    __torch_function__ = no_torch_function  # type: ignore[assignment]  # as ShardedTensor has it

    @staticmethod
    def __new__(cls, sharded: ShardedTensor) -> SealedTensor:
        made = make_wrapper(
            cls, sharded.shape, dtype=sharded.dtype, device=sharded.device, requires_grad=sharded.requires_grad
        )
        made.sharded = sharded
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # of saved tensors, as a checkpoint inside of a block makes them
            return SealedTensor(args[0].sharded.detach())
        raise PlanError(f"{UNSEEN} ({func})")

    def on_own(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a function on this rank's part, and seal its result; the dim that the part is cut along stays."""
        with DisableTorchFunction():
            made: Tensor = sealed(ShardedTensor(run(self.sharded.own()), self.sharded.axis, self.sharded.placement))
            return made


def sealed(tensor: Any) -> Any:
    """A sharded tensor sealed, always by the same tensor; anything else as it is."""
    if type(tensor) is not ShardedTensor:
        return tensor
    seal: weakref.ref[SealedTensor] | None = vars(tensor).get(_SEAL)
    known = None if seal is None else seal()
    if known is None:
        known = SealedTensor(tensor)
        setattr(tensor, _SEAL, weakref.ref(known))
    elif tensor.requires_grad and not known.requires_grad:  # it was changed in place
        known.requires_grad_()
    return known


def opened(tensor: Any) -> Any:
    """The inverse of `sealed`."""
    return tensor.sharded if isinstance(tensor, SealedTensor) else tensor


_SEAL = "_seal"
"""The attribute of a sharded tensor that refers to what it is sealed by."""
