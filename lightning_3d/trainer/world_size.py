"""``trainer.world_size`` in user code, which takes it for the number of model replicas, as it is under DDP."""

from __future__ import annotations

import sys

from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_3d.distributed.mesh import Mesh

_OURS = ("lightning", "lightning_3d", "pytorch_lightning", "lightning_fabric", "torch", "torchmetrics")
"""Packages that ask for the number of processes, and mean it."""

_TRAINER = "lightning.pytorch.trainer.trainer"
"""Asks for whoever reads ``trainer.world_size``."""


def warn_of_copies(mesh: Mesh | None, name: str) -> None:
    """Warn the user's code, where that called the caller of this and some ranks have the same samples.

    Args:
        mesh: None before it is known.
        name: The name of what it reads.
    """
    if mesh is None or mesh.shape.dp == mesh.shape.world_size:
        return
    frame = sys._getframe(2)
    if frame.f_globals.get("__name__") == _TRAINER and frame.f_back is not None:
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        return
    rank_zero_warn(
        f"{frame.f_code.co_filename}:{frame.f_lineno} reads {name}, which counts all {mesh.shape.world_size} ranks;"
        f" {mesh.shape.dp} of them at a time have different samples. What scales by replicas, as a learning rate or a"
        ' sampler, takes trainer.distributed_sampler_kwargs["num_replicas"], which is that number under DDP, too.'
    )
