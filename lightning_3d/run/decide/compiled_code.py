"""Modules that the user compiled: they run eagerly where steps meet stand-ins for tensors of other ranks, and where a
LightningModule was compiled as a whole.
"""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import to_uncompiled
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_3d.torch_internals.lightning_helpers import is_compiled_whole
from lightning_3d.torch_internals.modules import is_compiled

_MAX_NAMED = 3


def uncompile(module: LightningModule) -> None:
    """Let a module that was compiled as a whole have its own steps again; a warning says so."""
    if is_compiled_whole(module):
        rank_zero_warn(
            f"{type(module).__name__} was compiled as a whole by torch.compile, but its steps run eagerly. Compile the"
            " networks in it, as by self.net.compile() in __init__: data parallel runs those compiled."
        )
        to_uncompiled(module)


def warn_of_compiled(module: nn.Module) -> None:
    """Name the modules that ``torch.compile`` made; compiled functions leave no trace in a model."""
    compiled = [fqn or type(module).__name__ for fqn, inner in module.named_modules() if is_compiled(inner)]
    if compiled:
        more = len(compiled) - _MAX_NAMED
        names = ", ".join(compiled[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
        rank_zero_warn(
            f"{names}: compiled by torch.compile, but run eagerly, as steps with a pipeline or tensor parallel meet"
            " tensors that other ranks hold. compile.enabled=true compiles blocks in every layout."
        )
