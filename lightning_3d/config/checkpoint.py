"""The settings of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

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

    while_saving: Literal["wait", "skip"] = "wait"
    """``"wait"``: a checkpoint that is due while the one before is being written waits for it. ``"skip"``: it is left
    out, with a warning; never one after the last step of a fit."""

    on_save_failure: Literal["raise", "warn"] = "raise"
    """``"raise"``: a checkpoint that can't be written, as on a full disk, ends the fit. ``"warn"``: training goes on,
    with a warning. What was there before stays in both cases, and with ``"warn"`` checkpoints that it would have
    replaced stay until another one is written to their folder."""

    def __post_init__(self) -> None:
        check_values(self)
