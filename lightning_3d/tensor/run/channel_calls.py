"""Running calls on each rank's own channels, as `channelwise` decides."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.tensor.rules.channelwise import ChannelCall
from lightning_3d.tensor.rules.function import Function, map_tensors, tensors_in
from lightning_3d.tensor.run import crossing
from lightning_3d.tensor.run.crossing import local_shard, shard_dim
from lightning_3d.tensor.run.grouped_calls import whole
from lightning_3d.tensor.run.randomness import seeded_for_rank
from lightning_3d.tensor.run.running_statistics import RunningStatistics


def call_on_channels(function: Function, call: ChannelCall, mesh: DeviceMesh, statistics: RunningStatistics) -> Any:
    """Make a call on shards, or on full tensors if it has to be.

    Args:
        function: What is called.
        call: How.
        mesh: The tp axis.
        statistics: Of this forward of the block.
    """
    dim = call.dim
    if dim is None:
        return function(*map_tensors(whole, call.args), **map_tensors(whole, dict(call.kwargs)))
    buffers = {id(buffer) for buffer in call.statistics}

    def own(tensor: Tensor) -> Tensor:
        if id(tensor) in buffers:
            return statistics.own(tensor, changes=call.changes_statistics)
        if any(tensor is vector for vector in call.vectors):
            return local_shard(tensor) if shard_dim(tensor, mesh) == 0 else crossing.shard(whole(tensor), mesh, 0)
        return local_shard(tensor)

    args, kwargs = map_tensors(own, (call.args, dict(call.kwargs)))
    device = next(tensors_in((args, kwargs))).device
    with seeded_for_rank(device, mesh.get_local_rank()) if call.is_random else nullcontext():
        output = function(*args, **kwargs)
    return map_tensors(lambda tensor: crossing.as_sharded(tensor, mesh, dim), output)
