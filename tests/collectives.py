"""The collectives that a program makes, seen where torch hands them to the process group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d.tensor import BlockTensorPlan

# Operator -> kind, and which of its tensors is the full one: the largest.
_KINDS = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}

Sent = Counter[tuple[str, int]]
"""How many collectives of a kind each rank sends how many bytes for (ring algorithms)."""


class Collectives(TorchDispatchMode):
    """Notes collectives; a kind that it does not know raises."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith("wait") and "wrap" not in name:
            kind, size = _KINDS[name], dist.get_world_size()
            tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
            num_bytes = max(tensor.numel() * tensor.element_size() for tensor in tensors) * (size - 1) // size
            self.sent[kind, num_bytes * (2 if kind == "all-reduce" else 1)] += 1
        return output

    @property
    def counts(self) -> Counter[str]:
        """By kind."""
        return by_kind(self.sent)


def by_kind(sent: Sent) -> Counter[str]:
    """How many collectives of each kind."""
    counts: Counter[str] = Counter()
    for (kind, _), number in sent.items():
        counts[kind] += number
    return counts


def planned(plan: BlockTensorPlan, *, is_backward: bool) -> Sent:
    """What a plan says that the forward or the backward of its block communicates."""
    return Counter((made.kind, made.num_bytes) for made in plan.collectives if made.is_backward == is_backward)
