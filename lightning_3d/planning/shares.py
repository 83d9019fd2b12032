"""The shares of ranks in the training state of a replica: tensor parallel cuts a weight, ZeRO what is kept of it."""

from __future__ import annotations

from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.mesh import MeshShape, num_sharing
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan


def num_shards(tensor: BlockTensorPlan | None) -> dict[str, int]:
    """FQN of a weight in its block -> tensor-parallel ranks that have a shard of it, of those that are sharded."""
    return {} if tensor is None else {w.fqn: tensor.size for w in tensor.weights if w.shard_dim is not None}


def num_sharing_of(zero: ZeroConfig, shape: MeshShape, *, of_weights: bool = False) -> int:
    """Replicas that have a part each of optimizer states and gradients between steps, or of the weights."""
    if of_weights and zero.stage < 3:
        return 1
    return num_sharing(shape, zero_stage=zero.stage, shard_size=zero.shard_size)
