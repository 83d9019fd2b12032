"""The settings of activation memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from lightning_3d.config.checks import TYPE_PREFIX, Size, check_type_rule, check_values
from lightning_3d.errors import ConfigError

Mode = Literal["none", "full", "selective"]
"""How a block is recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationsConfig:
    """How much of the blocks' forwards is kept for their backwards."""

    section: ClassVar[str] = "activations"

    recompute: Mode | Literal["auto"] = "none"
    """``"full"``: a block keeps its inputs, and its backward computes the rest again (Chen et al. 2016).
    ``"selective"``: it also keeps the results of matrix products, convolutions, attention (Korthikanti et al. 2022) and
    the collectives of tensor parallel. The same numbers come out: random numbers are those of the forward; buffers,
    counters and hooks inside change or are called once. Blocks that checkpoint inside of themselves, or are called
    under a checkpoint, go on as they are. With schedules that split the backward, it stays in one piece on stages that
    recompute. Compiled blocks keep the same.
    ``"auto"``: as many blocks as ``budget`` asks for, in the way that costs the least time.
    ``"none"``: nothing."""

    budget: float | str | None = None
    """The memory that a rank may take in a training step: ``"auto"``, 90 % of what its device has for it; a number of
    GiB; or a share of the device's memory such as ``"80%"``. The peak of every rank is predicted, and shown in the
    plan; where it does not fit, training does not begin. With ``recompute="auto"`` it is ``"auto"`` unless set."""

    blocks: str | tuple[str, ...] = ()
    """Blocks to recompute or offload: ``"type:REGEX"`` by the names of their classes, or FQN patterns (``"layers.*"``;
    ``*`` and ``?`` as in a shell); by default all that are made of several modules."""

    every: Size = 1
    """Take the first of these blocks and every n-th after it."""

    partition: bool = False
    """Let the tensor-parallel ranks keep a slice each of the inputs of recomputed blocks, and gather them before they
    compute a block again (Rajbhandari et al. 2020): 1 / tensor_parallel_size of the memory, one all-gather more."""

    offload: bool = False
    """Move what these blocks keep to pinned host memory during the forward, beside the computation, and back ahead of
    their backward: the inputs of recomputed blocks, or their slices; the results that they keep; or everything, with
    ``recompute="none"``. What two blocks keep is on the device; weights, buffers and tensors below 1 MiB stay there.
    For accelerators."""

    fused_loss: Literal["auto", "never"] = "auto"
    """``"auto"``: where a linear layer's output goes to a cross entropy and nowhere else, both run together on chunks
    of rows, so that logits never exist in full; without gradients, only where its weights aren't sharded over ranks.
    ``"never"``: logits are made."""

    @property
    def plans_memory(self) -> bool:
        """Whether the peak of every rank is predicted."""
        return self.budget is not None

    def budget_bytes(self, total: int, available: int) -> int:
        """The budget of a rank.

        Args:
            total: Bytes of its device.
            available: Bytes that the rank may hold there, those that it holds already included.
        """
        if self.budget is None or self.budget == "auto":
            return available
        if isinstance(self.budget, str) and self.budget.endswith("%"):
            return int(total * float(self.budget.removesuffix("%")) / 100)
        return int(float(self.budget) * 2**30)

    def __post_init__(self) -> None:
        check_values(self)
        _check_blocks(self.blocks)
        _check_budget(self)
        _check_partition(self)
        if self.recompute == "none" and not self.offload and (self.blocks or self.every > 1):
            raise ConfigError(
                f"activations.blocks={self.blocks!r} and activations.every={self.every} say which blocks to recompute"
                " or offload, but activations.recompute='none' and activations.offload=False: set the former to 'full'"
                " or 'selective', or the latter to True"
            )


def _check_budget(config: ActivationsConfig) -> None:
    """Read the budget."""
    budget = config.budget
    if config.offload and (budget is not None or config.recompute == "auto"):
        raise ConfigError(
            f"activations.offload=True with activations.recompute={config.recompute!r} and"
            f" activations.budget={budget!r}: what stays on a device depends on when its copies to the host"
            " are done, which was not measured on an accelerator yet, so that no prediction could be trusted. Leave out"
            " the budget and name the blocks to recompute (recompute='full' or 'selective'), or leave out"
            " activations.offload"
        )
    if budget is None and config.recompute == "auto":
        object.__setattr__(config, "budget", "auto")
    if budget is None or budget == "auto":
        return
    try:
        number = float(budget.removesuffix("%")) if isinstance(budget, str) else float(budget)
    except ValueError:
        number = 0.0
    is_share = isinstance(budget, str) and budget.endswith("%")
    if not math.isfinite(number) or not 0.0 < number <= (100.0 if is_share else number):
        raise ConfigError(
            f"activations.budget={budget!r} is not allowed: use 'auto', a number of GiB above 0, or a share of the"
            " device's memory such as '80%'"
        )


def _check_partition(config: ActivationsConfig) -> None:
    """Refuse to cut what is not kept."""
    if config.partition and config.recompute == "none":
        raise ConfigError(
            "activations.partition=True cuts the inputs that recomputed blocks keep, but activations.recompute='none':"
            " set it to 'full' or 'selective'"
        )


def _check_blocks(blocks: str | tuple[str, ...]) -> None:
    """Refuse a regular expression that does not compile, and one pattern of FQNs that is no list."""
    if isinstance(blocks, tuple):
        return
    if not blocks.startswith(TYPE_PREFIX) or blocks == TYPE_PREFIX:
        raise ConfigError(
            f"activations.blocks={blocks!r} is not allowed: use '{TYPE_PREFIX}REGEX' with a regular expression for"
            f" class names, or a list of patterns of FQNs, as [{blocks!r}]"
        )
    check_type_rule("activations.blocks", blocks)
