"""The collectives that a program makes, seen where torch hands them to the process group."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d.planning.plan import Plan
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor import BlockTensorPlan
from lightning_3d.torch_internals.autograd import is_checkpointing, is_in_backward

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
    """Notes collectives; a kind that it does not know raises. Broadcasts of what is decided are in no plan, and no more
    is what a checkpoint in a block's own code makes again in the backward, of which it notes that apart.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.sent: Sent = Counter()
        self.again: Sent = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):  # FlexAttention
            return output
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and not name.startswith("wait") and "wrap" not in name:
            if name == "broadcast_":
                return output
            if name == "alltoall_base_":
                self.sent["all-to-all", _most_sent(args[1], args[4])] += 1
                return output
            kind, size = _KINDS[name], _group_size((args, kwargs))
            tensors = [leaf for leaf in tree_leaves((args, kwargs, output)) if isinstance(leaf, Tensor)]
            if size == 1:
                return output
            num_bytes = max(tensor.numel() * tensor.element_size() for tensor in tensors) * (size - 1) // size
            noted = self.again if is_in_backward() and is_checkpointing() else self.sent
            noted[kind, num_bytes * (2 if kind == "all-reduce" else 1)] += 1
        return output


def _most_sent(tensor: Tensor, counts: Sequence[int]) -> int:
    """Bytes that the rank which sends most sends to others, of the world's."""
    sent = torch.tensor((sum(counts) - counts[dist.get_rank()]) * tensor.element_size())
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return int(sent)


def _group_size(arguments: Any) -> int:
    """Of the process group among the arguments of an operator; the world's if it is given by name."""
    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return dist.ProcessGroup.unbox(leaf).size()
    return dist.get_world_size()


def planned(plan: BlockTensorPlan, *, is_backward: bool) -> Sent:
    """What a plan says that the forward or the backward of its block communicates."""
    return Counter((made.kind, made.num_bytes) for made in plan.collectives if made.is_backward == is_backward)


class BlockInputs(L.Callback):
    """Keeps what the first call of every tensor-parallel block gets in the last training step, to run it once more."""

    def __init__(self) -> None:
        self._inputs: dict[str, tuple[nn.Module, tuple[Any, ...], dict[str, Any], list[Tensor]]] = {}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        self._inputs.clear()
        self._hooks = []
        if not trainer.strategy.run.is_parallel:  # type: ignore[attr-defined]  # where a step is rehearsed, to plan
            return
        self._hooks = [
            pl_module.get_submodule(block.fqn).register_forward_pre_hook(self._keep(block.fqn), with_kwargs=True)
            for block in trainer.strategy.plan.blocks  # type: ignore[attr-defined]
            if block.tensor is not None and block.tensor.is_sharded
        ]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, fqn: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            copied: list[Tensor] = []  # also what a key-value cache holds; parameters copy themselves

            def detached(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
                copied.append(_detached(tensor))
                return copied[-1]

            if fqn not in self._inputs:
                with mock.patch.object(Tensor, "__deepcopy__", detached):
                    self._inputs[fqn] = (module, *copy.deepcopy((args, kwargs)), copied)

        return keep

    def sent(self, plan: Plan) -> dict[str, tuple[Sent, Sent]]:
        """FQN -> what the forward and the backward of the block send."""
        plans: Mapping[str, BlockTensorPlan | None] = {block.fqn: block.tensor for block in plan.blocks}
        return {fqn: _sent(plans[fqn], *call) for fqn, call in self._inputs.items()}  # type: ignore[arg-type]


def _detached(tensor: Tensor) -> Tensor:
    if isinstance(tensor, ShardedTensor):
        local = tensor.local.detach().clone().requires_grad_(tensor.requires_grad)
        return ShardedTensor(local, tensor.axis, tensor.placement)
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _sent(
    plan: BlockTensorPlan, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], copied: Sequence[Tensor]
) -> tuple[Sent, Sent]:
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    inputs = [leaf for leaf in dict.fromkeys([*leaves, *copied]) if leaf.requires_grad]
    with Collectives() as forward:
        leaves = tree_leaves(block.forward(*args, **kwargs))
    outputs = [leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and i not in plan.unused_outputs]
    outputs = [output for output in outputs if output.requires_grad]
    inputs += [parameter for parameter in block.parameters() if parameter.requires_grad]
    with Collectives() as backward:
        if not inputs or not outputs:  # a block without anything to train
            return forward.sent, backward.sent
        gradients = [torch.ones(output.shape, dtype=output.dtype, device=output.device) for output in outputs]
        nodes = [(output, output.grad_fn) for output in outputs]  # nobody reads the outputs
        ends = [output if node is None else GradientEdge(node, output.output_nr) for output, node in nodes]
        torch.autograd.grad(ends, inputs, gradients, allow_unused=True)
    assert backward.again <= forward.sent, "a checkpoint sends what its forward did not"
    return forward.sent, backward.sent
