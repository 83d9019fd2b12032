"""The order of fused weights in files: always the original one, whatever order tensor parallel keeps them in.

A fused weight (query, key and value in one) lies on the ranks in grouped order (`lightning_3d.tensor.placement`). Here
its values, and those of its optimizer state, go from one order to the other with the placements that they have. One
full tensor at a time is gathered for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed.tensor as dt
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import fill, full_value
from lightning_3d.errors import CheckpointError
from lightning_3d.tensor.placement import Parts


def in_original_order(values: Mapping[str, Any], parts: Mapping[str, Parts]) -> dict[str, Any]:
    """Values by FQN, those in grouped order as copies in original order; a collective of the ranks that hold them."""
    return {fqn: _changed(value, parts[fqn].ungrouped) if fqn in parts else value for fqn, value in values.items()}


def in_grouped_order(values: Mapping[str, Any], parts: Mapping[str, Parts]) -> dict[str, Any]:
    """The way back of `in_original_order`."""
    return {fqn: _changed(value, parts[fqn].grouped) if fqn in parts else value for fqn, value in values.items()}


def state_in_original_order(
    state: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Parts]
) -> dict[str, Mapping[str, Any]]:
    """Optimizer state by FQN and name, as `in_original_order`.

    Raises:
        CheckpointError: As `states_in_grouped_order`.

    """
    states_in_grouped_order(state, parts)
    return {fqn: _each(values, parts.get(fqn), in_original_order) for fqn, values in state.items()}


def states_in_grouped_order(
    state: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Parts]
) -> dict[tuple[str, str], Parts]:
    """The parts of those states of optimizers that are in grouped order, by FQN and name.

    Raises:
        CheckpointError: A state of a weight in grouped order is neither a scalar nor sharded as the weight is.

    """
    along = {}
    for fqn in state.keys() & parts.keys():
        for name, value in state[fqn].items():
            if isinstance(value, Tensor) and value.numel() > 1 and not _is_along(value, parts[fqn]):
                raise CheckpointError(
                    f"state {name!r} of {fqn} has shape {tuple(value.shape)}: of a weight that is sharded in "
                    f"parts of {parts[fqn].sizes} features, only states of the weight's own shape can be saved"
                )
            if _is_along(value, parts[fqn]):
                along[fqn, name] = parts[fqn]
    return along


def state_in_grouped_order(
    state: Mapping[str, Mapping[str, Any]], parts: Mapping[str, Parts]
) -> dict[str, Mapping[str, Any]]:
    """The way back of `state_in_original_order`."""
    return {fqn: _each(values, parts.get(fqn), in_grouped_order) for fqn, values in state.items()}


def _each(
    values: Mapping[str, Any],
    parts: Parts | None,
    change: Callable[[Mapping[str, Any], Mapping[str, Parts]], dict[str, Any]],
) -> Mapping[str, Any]:
    if parts is None:
        return values
    along = {name for name, value in values.items() if _is_along(value, parts)}
    return change(values, dict.fromkeys(along, parts))


def _is_along(value: object, parts: Parts) -> bool:
    return isinstance(value, DTensor) and value.dim() > parts.dim and value.shape[parts.dim] == sum(parts.sizes)


@torch.no_grad()
def _changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    assert isinstance(tensor, DTensor)
    changed = dt.empty(tensor.shape, dtype=tensor.dtype, device_mesh=tensor.device_mesh, placements=tensor.placements)
    fill(changed, change(full_value(tensor)))
    return changed
