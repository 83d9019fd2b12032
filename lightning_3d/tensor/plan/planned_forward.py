"""A block's forward as one rank of a tensor-parallel plan runs it, on fake tensors and without communication."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.interpreter import TensorInterpreter
from lightning_3d.tensor.plan.assumed_values import AssumedValues
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.plan.planned_axis import PlannedAxis
from lightning_3d.tensor.sequence import cut_sequence
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.tensors import count_as_parameter


class PlannedForward:
    """Runs a block's own forward with the first rank's shards.

    Args:
        plan: Of the block, whose weights are not sharded over the vocabulary.
    """

    def __init__(self, plan: BlockTensorPlan) -> None:
        self._plan, self._axis = plan, PlannedAxis(plan.size)
        self._sharding = {weight.fqn: weight.sharding for weight in plan.weights}

    def shape_of(self, fqn: str, shape: Sequence[int]) -> torch.Size:
        """That of the rank's part of a parameter of some full shape."""
        sharding = self._sharding[fqn]
        whole = torch.empty(shape, device="meta")
        return whole.shape if sharding is None else sharding.own(whole, self._plan.size, 0).shape

    def found(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters as the block's code finds them in one forward, given the rank's parts."""
        made: dict[int, Tensor] = {}  # ties stay ties
        for fqn, part in parts.items():
            if id(part) not in made:
                own, sharding = part.view_as(part), self._sharding[fqn]
                made[id(part)] = own if sharding is None else ShardedTensor(own, self._axis, sharding, is_weight=True)
                count_as_parameter(made[id(part)])
        return {fqn: made[id(part)] for fqn, part in parts.items()}

    def run(self, forward: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
        """Call the forward, in whose block hangs what `found` gave; the block's output."""
        plan = self._plan
        args, sequence = cut_sequence(args, self._axis) if plan.is_sequence_parallel else (args, None)
        interpreter = TensorInterpreter(self._axis, sequence)
        seen = custom_functions_seen(interpreter.on_custom_function)
        with AssumedValues(), interpreter.statistics, interpreter, seen:
            output = forward(*args, **kwargs)
        return interpreter.gathered(output, plan.unused_outputs)
