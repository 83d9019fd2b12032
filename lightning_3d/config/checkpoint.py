"""The settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lightning_3d.config.checks import check_values


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """How checkpoints are written; which kind is ``save_distributed_checkpoint``."""

    section: ClassVar[str] = "checkpoint"

    max_file_size: float = 16.0
    """With ``save_distributed_checkpoint="auto"``, the largest file in GiB, which rank 0 writes alone; checkpoints that
    would be larger are folders that all ranks write together. Estimated from the weights and two fp32 numbers for each
    that is trained, as Adam keeps."""

    async_save: bool = False
    """Write checkpoints in the background, from a copy of the state in the memory of the host, while training goes on.
    The end of a fit waits for it, by an exception or a signal, too."""

    def __post_init__(self) -> None:
        check_values(self)
