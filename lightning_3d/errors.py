"""The exceptions that users see.

Every message says what is wrong, the values, where, and the fix. Errors that depend on the configuration, the plan
or the batch signature are raised alike on every rank, before any collective that the others would wait in.
"""

from __future__ import annotations


class ThreeDError(Exception):
    """Base class of everything that lightning_3d raises on purpose."""


class ConfigError(ThreeDError, ValueError):
    """An unknown key, a value outside its choices, or sizes that do not fit the world size."""


class PlanError(ThreeDError, ValueError):
    """The model can't be cut or sharded as asked; names the block or the call."""


class MemoryPlanError(PlanError):
    """A rank does not fit in the memory that it may take."""


class TraceError(ThreeDError, RuntimeError):
    """The user's step can't be followed through pipeline stages; names the call and the place.

    Args:
        lacks_data: Whether it might be followed where all tensors have data, as a rank with the whole model has them.
    """

    def __init__(self, message: str, *, lacks_data: bool = False) -> None:
        super().__init__(message)
        self.lacks_data = lacks_data


class BatchError(ThreeDError, ValueError):
    """There is no batch to plan with, or it differs between ranks of one replica."""


class SplitError(BatchError):
    """A batch that can't be split into microbatches."""


class TooFewSamplesError(SplitError):
    """A batch of fewer samples than microbatches."""


class StepError(ThreeDError, RuntimeError):
    """A step that does something a pipeline can't run (no loss, manual optimization, several closures)."""


class CheckpointError(ThreeDError, RuntimeError):
    """A checkpoint that does not fit the model or can't be read."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """A checkpoint that is not there."""


class OffloadError(ThreeDError, RuntimeError):
    """Host memory or a directory to offload to that has no room, or can't be written; names it, and the bytes."""


class RankError(ThreeDError, RuntimeError):
    """Another rank failed, for which this one was waiting; names that rank, its step and its error."""
