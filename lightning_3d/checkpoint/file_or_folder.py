"""Whether a run's checkpoints are one file each, as of one process, or folders that every rank writes its part of."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.own_state import parameters_of
from lightning_3d.planning.memory.table import GIB, size_text
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.zero.optimizer_kind import num_states

_WIDE = 4  # bytes of a number in a state of a 16-bit parameter, mostly


def file_bytes(module: nn.Module, optimizers: Sequence[Optimizer]) -> int:
    """About how many bytes a file of the whole model and its optimizers would have, once these have stepped.

    Args:
        module: The whole module; what this rank holds no part of has its shape.
    """
    tensors = {tensor for _, tensor, _ in named_state(module)}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    for optimizer in optimizers:
        trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
        if trained:
            num_bytes = sum(parameter.numel() * max(parameter.element_size(), _WIDE) for parameter in trained)
            total += num_states(optimizer) * num_bytes
    return total


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
