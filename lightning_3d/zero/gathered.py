"""FSDP2's units that the last forward may have left gathered."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard_units(module: nn.Module) -> None:
    """Let the units in a module show the Parameters that optimizers have, of which each rank holds a part."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()
