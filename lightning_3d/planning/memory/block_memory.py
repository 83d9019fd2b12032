"""The memory that one call of a block takes while it runs, measured on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lightning_3d.model.snapshot import preserved
from lightning_3d.planning.loads import Inputs
from lightning_3d.planning.memory.block_run import BlockRun, KeptStorages
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.plan.planned_forward import PlannedForward
from lightning_3d.torch_internals.dispatch import GROUPED_MM, SCALED_GROUPED_MM
from lightning_3d.torch_internals.fake_tensors import FakeTensorMode, on_fake_tensors
from lightning_3d.torch_internals.lightning_helpers import random_states_kept


def _flops_of_grouped(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """Floating-point operations of a product per expert, [M, K] and [G, K, N]."""
    return 2 * math.prod(input) * weight[-1]


FORMULAS = {op: _flops_of_grouped for op in (GROUPED_MM, SCALED_GROUPED_MM)}
"""Formulas of products that torch's counter of operations does not know."""

_FLOPS_PER_BYTE = 32
"""Operations of a device while it writes a byte, about; weighs products of matrices against other operators."""


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Bytes above those before, at most, in one call of a block."""

    forward: int
    """While autograd keeps what the backward needs."""
    forward_alone: int
    """Without autograd."""
    backward: int
    """Above what the forward had kept, with the gradients of outputs and inputs."""
    input_backward: int
    """The same for gradients of inputs alone, where the backward is split."""
    held: int
    """Bytes that wait for the gradients of the weights, where the backward is split."""
    weight_backward: int
    """Above these and what the forward had kept."""
    full_cost: int
    """The time of another forward; a number to compare."""
    selective_cost: int
    """The time of another forward but for its costly operators."""
    kept: KeptStorages | None = None
    """Storages of one rank between forward and backward, where those are not what the trace saw."""

    def divided(self, number: int, returned: int) -> BlockMemory:
        """That of each of a number of ranks that share the block's weights, about; outputs are whole.

        Args:
            returned: Bytes of its outputs.
        """
        parts = {name: value // number for name, value in vars(self).items() if name != "kept"}
        whole = returned - returned // number
        parts |= {name: parts[name] + whole for name in ("forward", "forward_alone", "backward")}
        return BlockMemory(**parts)


def measure_memory(
    block: nn.Module, inputs: Inputs, device: torch.device, tensor: BlockTensorPlan | None = None
) -> BlockMemory:
    """Run a block on fake tensors, forward and backward.

    Args:
        inputs: Of a call.
        device: Where it would run.
        tensor: To measure one tensor-parallel rank; without weights sharded over the vocabulary.

    Raises:
        Exception: of the block, which can't run without data.
    """
    with random_states_kept(), preserved(block), on_fake_tensors(FakeTensorMode(allow_non_fake_inputs=True)):
        run = BlockRun(block, inputs, device, None if tensor is None else PlannedForward(tensor))
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            forward_alone = run.alone()
        forward, cheap, backward = run.whole()
        input_backward, held, weight_backward = run.split() or (backward, 0, 0)
        kept = None if tensor is None else run.kept()
    return BlockMemory(
        forward=forward,
        forward_alone=forward_alone,
        backward=backward,
        input_backward=input_backward,
        held=held,
        weight_backward=weight_backward,
        full_cost=counter.get_total_flops() // _FLOPS_PER_BYTE + cheap,
        selective_cost=cheap,
        kept=kept,
    )
