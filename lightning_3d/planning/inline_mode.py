"""Whether a pipeline runs steps in microbatches or inline, and why; and what its loss is, for people."""

from __future__ import annotations

import torch
from lightning.pytorch import LightningModule

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import BatchError, ConfigError, MemoryPlanError, SplitError, ThreeDError, TooFewSamplesError

_LOSSES = {
    "auto": "that of the whole batch, as on one device; the first step shows how the microbatches' losses make it up",
    "mean": "the mean over samples of the microbatches' losses",
    "sum": "the sum of the microbatches' losses",
    "whole": "computed once, on the whole batch, while the activations of all microbatches are held",
}
_MORE = "the code after the blocks runs once more, on the whole batch, for metrics, rows and attributes that it gives"


def reason_for_inline(module: LightningModule, config: ThreeDConfig) -> str | None:
    """Why steps run inline, as far as it is known before one is traced; None if they may run in microbatches."""
    if config.pipeline_parallel_size == 1:
        return None
    if config.pipeline.mode == "inline":
        return "as set by pipeline.mode"
    if config.pipeline.mode == "auto" and not module.automatic_optimization:
        return "as it uses manual optimization"
    return None


def is_microbatched(config: ThreeDConfig, shape: MeshShape) -> bool:
    """Whether batches flow through stages in pieces, with this mode."""
    return shape.pp > 1 and config.pipeline.mode != "inline"


def naming_inline(error: BaseException, mode: str) -> BaseException:
    """The error of a step that stages can't follow in training, with what else to do.

    Args:
        mode: That the pipeline was to run in.
    """
    modes = "auto or inline, which run" if mode == "microbatched" else "inline, which runs"
    if isinstance(error, ThreeDError):
        error.args = (f"{error} Or set pipeline.mode={modes} any step, one stage at a time.",)
    return error


def follows_from_stages(error: Exception, config: ThreeDConfig) -> bool:
    """Whether an error in planning is one of stages, for which ``pipeline.mode="auto"`` runs steps inline."""
    if config.pipeline.mode == "microbatched":
        return False
    if isinstance(error, TooFewSamplesError):
        return config.pipeline.num_microbatches == "auto"
    if isinstance(error, BatchError):
        return isinstance(error, SplitError)
    return not isinstance(error, (ConfigError, MemoryPlanError, torch.OutOfMemoryError))


def unfollowed_text(error: BaseException) -> str:
    """Why steps run inline, for ``inline_text``."""
    return f"as stages can't follow it. {reason_of(error)}"


def reason_of(error: BaseException) -> str:
    """The message of an error, in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ThreeDError) else f"{type(error).__name__}: {text}"


def inline_text(why: str) -> str:
    """A line for people.

    Args:
        why: From ``reason_for_inline``, or what stages can't follow.
    """
    return (
        "steps run inline, on the whole batch and whole sequences, and each block where its weights are, so that one"
        f" rank of the pipeline computes at a time: {why}"
    )


def once_inline_text(why: str) -> str:
    """A line for people on one step among others in microbatches; arguments as of `inline_text`."""
    return (
        "this step runs inline, on the whole batch, and each block where its weights are, and so do all that follow if"
        f" it happens again: {why}"
    )


def loss_text(setting: str, *, has_side_effects: bool) -> str:
    """A line for people on ``pipeline.loss``: how the loss of a batch comes from those of its microbatches."""
    more = f"; {_MORE}" if has_side_effects and setting != "whole" else ""
    return f"loss: {_LOSSES[setting]} (pipeline.loss={setting}){more}"
