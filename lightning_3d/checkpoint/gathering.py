"""Whole values on rank 0 of what all ranks hold parts of, all at once or one at a time.

Tensors come over dp and tp by DTensor, or point-to-point from the one data-parallel rank that owns it, then
point-to-point from the stage that owns it to rank 0.

    stage 1, dp 0..1, tp 0..1      full_value (all-gather in the stage)      rank of the pp group of rank 0: send
    stage 0, rank 0                                                          receive, copy to the CPU
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Generic, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import TensorInfo, full_value
from lightning_3d.checkpoint.feature_order import in_original_order
from lightning_3d.checkpoint.own_state import Key, exchange, owners, rank_on
from lightning_3d.tensor.placement import Parts
from lightning_3d.torch_internals.pytree import tree_map_only

NO_PARTS: Mapping[Any, Parts] = MappingProxyType({})


class Gather(Protocol):
    """Values on rank 0 of what each rank has, by key, and nothing elsewhere; a collective of all ranks.

    Arguments are those of `Gathering`.
    """

    def __call__(
        self,
        own: Mapping[Key, Any],
        pp: DeviceMesh | None,
        dp: DeviceMesh | None = None,
        grouped: Mapping[Key, Parts] = NO_PARTS,
    ) -> dict[Key, Any]: ...


class Gathering(Generic[Key]):
    """Full tensors and other values of what each rank has; making it is a collective of all ranks.

    Args:
        own: What this rank has, by key.
        pp: The pp axis through this rank, whose group rank is the stage; None without pipeline parallel.
        dp: The axis of the data-parallel ranks that share the values, through this rank; None if each has its part of
            all of them.
        grouped: The parts of tensors that tensor parallel keeps in grouped order, which come in their original one.
    """

    def __init__(
        self,
        own: Mapping[Key, Any],
        pp: DeviceMesh | None,
        dp: DeviceMesh | None = None,
        grouped: Mapping[Key, Parts] = NO_PARTS,
    ) -> None:
        self._own, self._pp, self._dp, self._grouped = own, pp, dp, grouped
        replicas = exchange({key: TensorInfo.of(value) or value for key, value in own.items()}, dp)
        self._replica_of = owners(replicas)
        stages = exchange({key: replicas[replica][key] for key, replica in self._replica_of.items()}, pp)
        self._stage_of = owners(stages)
        self.found: dict[Key, Any] = {key: stages[stage][key] for key, stage in self._stage_of.items()}
        """The `TensorInfo` of tensors, and values that are none, by key; alike on all ranks that gather."""

    def is_at_hand(self, key: Key) -> bool:
        """Whether `value` takes neither memory nor other ranks on this rank, rank 0."""
        if not isinstance(self.found[key], TensorInfo):
            return True
        if self._stage_of[key] != 0 or self._replica_of[key] != 0 or key in self._grouped:
            return False
        own = self._own[key]
        return not isinstance(own, DTensor) and own.device.type == "cpu" and _is_whole(own)

    def value(self, key: Key) -> Any:
        """The value, its tensors whole and on the CPU; None but on rank 0. A collective of all ranks."""
        value, stage = self.found[key], self._stage_of[key]
        is_tensor = isinstance(value, TensorInfo)
        if is_tensor and stage == rank_on(self._pp):
            value = self._in_stage(key)
        if is_tensor and stage != 0 and self._pp is not None:
            is_for_first = dist.get_global_rank(self._pp.get_group(), 0) == 0
            value = _to_first(value, stage, self._pp) if is_for_first else None
        return tree_map_only(Tensor, _on_cpu, value) if dist.get_rank() == 0 else None

    def _in_stage(self, key: Key) -> Tensor | TensorInfo | None:
        """The full tensor, on the first rank of the dp axis at least."""
        value, replica = self._own.get(key, self.found[key]), self._replica_of[key]
        if key in self._grouped and isinstance(value, Tensor):
            value = in_original_order({"": value}, {"": self._grouped[key]})[""]
        if self._dp is None or replica == 0:
            return full_value(value) if isinstance(value, Tensor) else value
        return _to_first(value, replica, self._dp)


def gather(
    own: Mapping[Key, Any],
    pp: DeviceMesh | None,
    dp: DeviceMesh | None = None,
    grouped: Mapping[Key, Parts] = NO_PARTS,
) -> dict[Key, Any]:
    """All values at once; a `Gather`."""
    gathering = Gathering(own, pp, dp, grouped)
    full = {key: gathering.value(key) for key in gathering.found}
    return full if dist.get_rank() == 0 else {}


def _to_first(value: Tensor | TensorInfo | None, owner: int, axis: DeviceMesh) -> Tensor | None:
    """Move a full tensor from one rank of the axis to its first; None on ranks that do not end up with it."""
    group = axis.get_group()
    # Through host memory where the group can: there rank 0 keeps it, and gloo sends from nowhere else.
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else axis.device_type
    if axis.get_local_rank() == owner:
        assert isinstance(value, Tensor)
        # As bytes, since backends do not send every dtype.
        content = value.to(device).contiguous().reshape(-1).view(torch.uint8)
        if content.numel() > 0:
            dist.send(content, group=group, group_dst=0)
        return None
    if axis.get_local_rank() != 0:
        return None
    assert value is not None
    received = torch.empty(value.shape, dtype=value.dtype, device=device)
    if received.numel() > 0:
        dist.recv(received.reshape(-1).view(torch.uint8), group=group, group_src=owner)
    return received


def _on_cpu(tensor: Tensor) -> Tensor:
    tensor = tensor.cpu()
    # A view of something larger (gathered with padding) would be written to the file with all of it.
    return tensor if _is_whole(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _is_whole(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == tensor.nbytes
