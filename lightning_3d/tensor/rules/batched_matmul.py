"""Products of two stacks of matrices, ``[..., n, k] @ [..., k, m]``, that are sharded on the same batch dim."""

from __future__ import annotations

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.placement import EACH, Placement, Sharded
from lightning_3d.tensor.rules.call import Call, LocalCall
from lightning_3d.tensor.rules.function import is_batched_matmul
from lightning_3d.tensor.sharded_tensor import placement_of


def multiply_stacks(call: Call, axis: Axis) -> LocalCall | None:
    """Every rank multiplies its own matrices; a plain operand is cut alike, or broadcast."""
    if not is_batched_matmul(call.function, call.args, call.kwargs):
        return None
    left, right = call.args
    placements = {placement for operand in call.args if (placement := placement_of(operand)) is not None}
    at = placements.pop()
    if placements or not isinstance(at, Sharded) or left.dim() != right.dim() or at.dim >= left.dim() - 2:
        return None
    length = max(left.shape[at.dim], right.shape[at.dim])
    if any(operand.shape[at.dim] not in (1, length) for operand in call.args):
        return None
    needs: list[Placement] = [at if operand.shape[at.dim] == length else EACH for operand in call.args]
    return LocalCall(tensors=(left, right), needs=tuple(needs), run=call.run, result=at)
