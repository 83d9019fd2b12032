"""Where a block begins and ends: its input may be cut along the sequence, its output is gathered."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_3d.tensor import collectives
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.interpret import Interpreter
from lightning_3d.tensor.placement import Shard
from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM
from lightning_3d.tensor.sharded_tensor import ShardedTensor, shard_dim
from lightning_3d.torch_internals.pytree import tree_flatten, tree_unflatten


def slice_of_sequence(tensor: Tensor, axis: Axis) -> ShardedTensor:
    """This rank's slice of a block's input, (B, T, D); a copy, so that nothing retains the rest of it."""
    along = Shard(SEQUENCE_DIM)
    own = collectives.cut(tensor, axis, along)
    return ShardedTensor(own if tensor.requires_grad else own.clone(), axis, along)


def gathered(output: Any, interpreter: Interpreter, unread: frozenset[int]) -> Any:
    """A block's output as plain tensors, but for evenly sharded leaves that nothing reads."""
    leaves, spec = tree_flatten(output)
    whole: dict[int, Tensor] = {}  # a leaf that stands in several places is gathered once
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and not (i in unread and shard_dim(leaf) is not None):
            if id(leaf) not in whole:
                whole[id(leaf)] = interpreter.whole(leaf)
            leaves[i] = whole[id(leaf)]
    return tree_unflatten(leaves, spec)
