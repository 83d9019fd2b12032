"""Whether a run's checkpoints are one file each, as of one process, or folders that every rank writes its part of."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.optimizer_states import parameters_of
from lightning_3d.memory.rank_memory import GIB, size_text
from lightning_3d.torch_internals.modules import named_state

_STATE = 2 * 4  # bytes that Adam keeps of each number that it trains


def file_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """About how many bytes a file of the whole model and its optimizers would have, if these were Adam.

    Args:
        module: The whole module; what this rank holds no part of has its shape.
    """
    tensors = {tensor for _, tensor, _ in named_state(module)}
    trained = [p for optimizer in optimizers for p in parameters_of(optimizer) if p.requires_grad]
    return sum(t.numel() * t.element_size() for t in tensors) + sum(_STATE * p.numel() for p in trained)


def is_too_large(num_bytes: int, max_file_size: float) -> bool:
    """Whether a file would be larger than the setting `checkpoint.max_file_size`, in GiB; tells so on rank 0."""
    if num_bytes <= max_file_size * GIB:
        return False
    rank_zero_info(
        f"Checkpoints become folders that every rank writes its part of, as one file would have about"
        f" {size_text(num_bytes)} and checkpoint.max_file_size is {max_file_size:g} GiB. Set"
        " save_distributed_checkpoint=False for files nevertheless."
    )
    return True
