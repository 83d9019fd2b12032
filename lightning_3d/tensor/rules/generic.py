"""Any other call: every rank makes it on its own shards where it has a local form (`local_form`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, Parts, Placement, Shard, in_parts
from lightning_3d.tensor.rules.call import PARTIAL, Call, LocalCall
from lightning_3d.tensor.rules.local_form import LocalForm, Operand, call_locally, local_form, signature
from lightning_3d.tensor.sharded_tensor import placement_of


def generic(call: Call, axis: Axis) -> LocalCall | None:
    """The local form of a call, or None.

    Args:
        call: Some of its tensors are sharded.
        axis: The axis that they are sharded over.
    """
    form, sizes = _looked_up(call, axis.size)
    if form is None:
        return None
    tensors = call.tensors
    needs: list[Placement] = []
    for tensor, cut in zip(tensors, form.cuts, strict=True):
        placement = placement_of(tensor)
        if placement is not None:
            needs.append(placement)
        else:
            needs.append(EACH if cut is None else in_parts(cut, sizes, axis.size))
    run = call.run
    if form.local_shape is not None:
        run = functools.partial(call_locally, call.function, form.local_shape)
    if form.is_mean:
        run = functools.partial(_mean, run, axis.size)
    result = tuple([PARTIAL if dim is None else in_parts(dim, sizes, axis.size) for dim in form.dims])
    return LocalCall(tensors=tensors, needs=tuple(needs), run=run, result=result)


def _looked_up(call: Call, size: int) -> tuple[LocalForm | None, tuple[int, ...]]:
    """The form, and the sizes of the parts of what is sharded, if it has any."""
    placements = [placement for tensor in call.tensors if (placement := placement_of(tensor)) is not None]
    parts = {placement.sizes if isinstance(placement, Parts) else () for placement in placements}
    if len(parts) != 1:
        return None, ()
    try:
        args, kwargs = signature(call.args, _operand), signature(call.kwargs, _operand)
        return local_form(call.function, args, kwargs, size), next(iter(parts))
    except TypeError:  # an argument that can't be hashed
        return None, ()


def _operand(tensor: Tensor) -> Operand:
    placement = placement_of(tensor)
    if isinstance(placement, Parts):
        return Operand(tensor.shape, tensor.dtype, tensor.device, placement.dim, placement.sizes)
    return Operand(tensor.shape, tensor.dtype, tensor.device, placement.dim if isinstance(placement, Shard) else None)


def _mean(run: Callable[..., Any], size: int, *tensors: Tensor) -> Any:
    return run(*tensors) / size
