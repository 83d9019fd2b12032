"""Names of modules in the traces of Lightning's PyTorchProfiler: a pair of hooks around each forward records them.

With a pipeline, tensor parallel or a budget of memory blocks are traced, and some run on another rank, so that hooks
after a forward are called without those before it.
"""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.torch_internals import lightning_helpers


def leave_out_module_names(trainer: Trainer) -> None:
    """Record none; a warning says so."""
    if lightning_helpers.leave_out_module_names(trainer):
        rank_zero_warn(
            "PyTorchProfiler records operators, but no names of modules with a pipeline, tensor parallel or"
            " activations.budget, where forwards of some of them are traced or run on other ranks."
            " record_module_names=False leaves out this warning."
        )
