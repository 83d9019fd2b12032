"""A sharded activation inside a block: a handle with the full shape on a plain local tensor.

`sharded_calls` answers the calls of user code with it. Autograd follows the local tensors alone: neither the handle
nor DTensor takes part, which is what makes a block's local work as fast as that of layers written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.errors import PlanError
from lightning_3d.torch_internals.tensors import make_wrapper, no_torch_function

_UNSEEN = (
    "a sharded activation was used where tensor parallel does not see it: by code that bypasses torch's function "
    "modes, or after the block's forward"
)


class ShardedActivation(Tensor):
    """Evenly sharded on one dim over the tp axis.

    Args:
        local: The own shard, with its autograd history.
        mesh: The tp axis.
        dim: The sharded dim.

    Raises:
        PlanError: torch itself, not `sharded_calls`, computes with it or hands it a gradient.
    """

    local: Tensor
    mesh: DeviceMesh
    shard_dim: int
    is_weight: bool = False
    """Whether it was made of a weight, and is multiplied with as one."""

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, local: Tensor, mesh: DeviceMesh, dim: int) -> ShardedActivation:
        shape = (*local.shape[:dim], local.shape[dim] * mesh.size(), *local.shape[dim + 1 :])
        handle = make_wrapper(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)
        handle.local, handle.mesh, handle.shard_dim = local, mesh, dim
        if local.requires_grad:
            handle.register_hook(_refuse)  # type: ignore[no-untyped-call]  # torch 2.13
        return handle

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares an instance method
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise PlanError(f"{_UNSEEN} ({func})")

    def own_shard(self) -> Tensor:
        """The local tensor."""
        if self.grad_fn is not None:  # the result of an autograd function: `local` lacks that part of the history
            raise PlanError(f"{_UNSEEN} ({self.grad_fn.name()})")
        return self.local

    def follow_local(self) -> None:
        """After the local tensor was changed in place: it may need a gradient now."""
        if self.local.requires_grad and not self.requires_grad:
            self.requires_grad_()
            self.register_hook(_refuse)  # type: ignore[no-untyped-call]


def _refuse(gradient: Tensor) -> None:
    raise PlanError(_UNSEEN)
