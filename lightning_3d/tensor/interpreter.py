"""The interpreter of a block under tensor parallel: its weights are DTensors, and its sequence may be cut, too."""

from __future__ import annotations

from collections import defaultdict
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.interpret import ByTensor, Interpreter
from lightning_3d.sharding.placement import Placement, Shard
from lightning_3d.sharding.rules.call import PARTIAL, LocalCall, TorchCall
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.own_shard import own_shard
from lightning_3d.tensor.sequence import SEQUENCE_DIM, GatheredSequence, along_sequence, is_along


class TensorInterpreter(Interpreter):
    """Active during one forward of one block.

    Args:
        axis: The axis that the block is sharded over.
        sequence: Full shape (B, T, D) of the block's input that is cut along its sequence; None if none is.
        data_dependent_routing: As for `Interpreter`.
    """

    kinds = (ShardedTensor, DTensor)

    remedy = "let tensor.plan replicate the block's weights"

    def __init__(self, axis: Axis, sequence: torch.Size | None = None, *, data_dependent_routing: bool = False) -> None:
        super().__init__(axis, data_dependent_routing=data_dependent_routing)
        self.sequence = sequence
        self.along_sequence = Shard(SEQUENCE_DIM) if sequence is None else along_sequence(sequence, axis)
        """How activations lie along the sequence that is cut."""
        self._gathered: defaultdict[object, ByTensor[GatheredSequence]] = defaultdict(ByTensor)
        """By whether autograd records, and what autocast casts to."""

    @override
    def dispatch(self, call: TorchCall) -> Any:
        if any(isinstance(tensor, DTensor) for tensor in call.tensors):
            call = call.mapped(self._of_parameter)
        return super().dispatch(call)

    @override
    def read_by_each(self, tensor: Tensor, contexts: list[AbstractContextManager[object]]) -> Tensor:
        if not isinstance(tensor, ShardedTensor) or not self.is_slice_of_sequence(tensor):
            return super().read_by_each(tensor, contexts)
        gathered = self._sequence_of(tensor)
        contexts.append(gathered.not_saved())
        return gathered.whole

    @override
    def moved(self, tensor: ShardedTensor, target: Placement) -> Tensor:
        if self.is_slice_of_sequence(tensor):
            return redistribute(tensor.own(), self.axis, tensor.placement, target, saves=False)
        return super().moved(tensor, target)

    @override
    def sum(self, summand: Tensor, local: LocalCall) -> Tensor:
        """Also, for a weight's output along the sequence: this rank's slice of the sum."""
        if local.weight is not None and is_along(summand, self.sequence):
            along = self.along_sequence
            return ShardedTensor(redistribute(summand, self.axis, PARTIAL, along), self.axis, along)
        return super().sum(summand, local)

    def is_slice_of_sequence(self, tensor: ShardedTensor) -> bool:
        """Whether a tensor is cut along the sequence of the block's input."""
        return is_along(tensor, self.sequence) and tensor.placement == self.along_sequence

    def _sequence_of(self, tensor: ShardedTensor) -> GatheredSequence:
        kind = tensor.device.type
        casts_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        gathered = self._gathered[torch.is_grad_enabled(), casts_to]
        return gathered.get(tensor.local, lambda: GatheredSequence(tensor.own(), self.axis, self.along_sequence))

    def _of_parameter(self, tensor: Tensor) -> Tensor:
        """Parameters that reach a call past their module, as those of recurrent layers do."""
        if not isinstance(tensor, DTensor):
            return tensor
        placement, own = tensor.placements[0], own_shard(tensor)
        if placement.is_replicate():
            return own
        at = Shard(placement.dim)  # type: ignore[attr-defined]  # no partial parameters
        return ShardedTensor(own, self.axis, at, is_weight=True)
