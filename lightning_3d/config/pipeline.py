"""The settings of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_3d.config.checks import TYPE_PREFIX, Size, check_type_rule, check_values
from lightning_3d.errors import ConfigError

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv"]

PARTITION_METHODS = ("auto", "parameters", "uniform")
"""Values of ``pipeline.partition`` that stand for themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How the model is cut into stages and how the batch flows through them."""

    section: ClassVar[str] = "pipeline"

    mode: Literal["auto", "microbatched", "inline"] = "auto"
    """``"microbatched"``: the batch flows through the stages in pieces, and all compute at a time. ``"inline"``: every
    rank runs the step as it is, on the whole batch, and each block where its weights are, one after the other: for any
    program, as with manual optimization, batches that can't be split or steps that read data, at the price that a rank
    waits while others compute. ``"auto"``: microbatched where the step can be followed by stages, else inline, which
    is said in the plan and when training begins."""

    num_microbatches: Size | Literal["auto"] = "auto"
    """Pieces that each rank's batch is cut into; ``"auto"`` is the number of stages."""

    partition: str | tuple[str, ...] = "auto"
    """The load to balance. ``"auto"``: the time of forward and backward, counted in operations and bytes on tensors
    without data, within the memory of a rank or ``activations.budget``, as the plan reports it; where a block can't run
    without data and in inline mode, as ``"parameters"``, which the plan says. ``"uniform"``: calls of blocks.
    ``"type:REGEX"`` balances parameters and takes the modules whose class name matches the regular expression as the
    blocks. A list of FQNs names the block with which each stage after the first begins."""

    schedule: ScheduleName = "1f1b"
    """``"gpipe"``: all forwards, then all backwards (Huang et al. 2019). ``"1f1b"``: one forward, one backward in
    turn, which holds fewer activations (Narayanan et al. 2021); needs as many microbatches as ranks.
    ``"interleaved"``: 1F1B with several stages per rank, which shrinks the bubble (Narayanan et al. 2021).
    ``"interleaved_zero_bubble"`` and ``"zbv"`` also split the backward, so that weight gradients fill the bubble (Qi et
    al. 2023); with these, ZeRO stages 2 and 3 keep gradients and parameters whole until the end of the step. The
    backward stays in one piece on stages with reentrant checkpoints, and where nothing received requires grad."""

    stages_per_rank: Size | Literal["auto"] = "auto"
    """Stages that each rank runs; ``"auto"`` is 2 for the last three schedules and 1 for the others."""

    loss: Literal["auto", "mean", "sum", "whole"] = "auto"
    """How the loss of a batch comes from those of its microbatches. ``"mean"``: by samples. ``"sum"``. ``"whole"``: the
    code after the blocks runs once, on the whole batch, between all forwards and all backwards: for losses that couple
    samples, at the price of the activations of all microbatches. ``"auto"`` finds out which of these it is, or what
    each microbatch weighs, and how other values that a step gives are joined."""

    def __post_init__(self) -> None:
        check_values(self)
        _check_partition(self.partition)
        if self.mode == "inline":
            self._check_inline()

    def _check_inline(self) -> None:
        """Refuse what says how microbatches flow."""
        for name, default in (("num_microbatches", "auto"), ("schedule", "1f1b"), ("stages_per_rank", "auto")):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"pipeline.{name}={getattr(self, name)!r} says how microbatches flow through stages, but with"
                    " pipeline.mode='inline' the whole batch goes from block to block: leave it out"
                )
        if self.loss != "auto":
            raise ConfigError(
                f"pipeline.loss={self.loss!r} says how the losses of microbatches are joined, but with"
                " pipeline.mode='inline' the step's loss is the one of the whole batch: leave it out"
            )

    @property
    def as_inline(self) -> PipelineConfig:
        """The same in inline mode."""
        return PipelineConfig(mode="inline", partition=self.partition)

    @property
    def num_local_stages(self) -> int:
        """Stages per rank, with ``"auto"`` resolved."""
        if self.mode == "inline":
            return 1
        if self.stages_per_rank == "auto":
            return 1 if self.schedule in ("gpipe", "1f1b") else 2
        return self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the rest of the backward."""
        return self.mode != "inline" and self.schedule in ("interleaved_zero_bubble", "zbv")

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """For every stage the index of its rank on a pp axis of ``pp`` ranks: round and round, or there and back."""
        if pp == 1:
            return (0,)
        if self.schedule == "zbv" and self.mode != "inline":
            return (*range(pp), *reversed(range(pp)))
        return tuple(range(pp)) * self.num_local_stages


def _check_partition(partition: str | tuple[str, ...]) -> None:
    """Refuse a partition method that does not exist, a regular expression that does not compile, and equal FQNs."""
    if isinstance(partition, tuple):
        if len(set(partition)) < len(partition):
            raise ConfigError(f"pipeline.partition={list(partition)} names a block twice: name one for each stage")
        return
    if partition in PARTITION_METHODS:
        return
    if not partition.startswith(TYPE_PREFIX) or partition == TYPE_PREFIX:
        raise ConfigError(
            f"pipeline.partition={partition!r} is not allowed: use {', '.join(map(repr, PARTITION_METHODS))},"
            " 'type:REGEX' with a regular expression for class names, or a list of the FQNs of blocks"
        )
    check_type_rule("pipeline.partition", partition)
