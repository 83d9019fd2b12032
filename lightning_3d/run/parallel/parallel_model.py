"""``ParallelModel``: the model as this rank trains it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch.optim import Optimizer

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.batch_guard import BatchGuard
from lightning_3d.distributed.rng import StepRandomness
from lightning_3d.memory.rank_memory import size_text
from lightning_3d.parts.layout import Layout
from lightning_3d.planning.budget import Budget
from lightning_3d.planning.held import StateMemory
from lightning_3d.planning.inline_mode import inline_text
from lightning_3d.planning.plan import Findings, Plan
from lightning_3d.run.decide.built_model import BuiltModel
from lightning_3d.run.parallel.shared_buffers import SharedBuffers
from lightning_3d.run.step.step_runner import TRAINING, StepRunner
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads
from lightning_3d.trace.interception import Router
from lightning_3d.waits import CountedWait
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.gradients import Gradients
from lightning_3d.zero.optimizer_kind import num_states


@dataclass(kw_only=True)
class ParallelModel:
    """The model as this rank trains it."""

    built: BuiltModel
    """From before this rank took its part."""
    plan: Plan
    """Says more when there are optimizers, and when steps have run."""
    zero: Zero
    gradients: Gradients
    router: Router
    """Routes the blocks' calls; to be installed while the Trainer runs."""
    guard: BatchGuard
    buffers: SharedBuffers
    runner: StepRunner
    randomness: StepRandomness
    heads: FusedHeads
    apply_checkpointing: Callable[[Plan], None]
    """Lets blocks be computed again in their backwards, and offload what they keep, as a plan says."""
    budget: Budget | None
    compiling: CountedWait
    """For blocks that were compiled."""
    layout: Layout
    is_empty: bool
    """Whether a checkpoint has yet to fill it."""
    is_told: bool = False
    """Whether rank 0 has said what layout is running."""

    def held(self, config: ThreeDConfig, optimizers: Iterable[Optimizer]) -> StateMemory:
        """The memory that ranks hold whatever they compute, when these optimizers step the model."""
        num = max(map(num_states, optimizers), default=0)
        return StateMemory.of_plan(self.built.shapes, self.plan, config, num)

    def settle(self) -> None:
        """Wait for what the last step still communicates."""
        self.zero.wait_params()
        self.guard.settle()

    @property
    def present_plan(self) -> Plan:
        """The plan, with what the steps so far have shown of heads, losses and gathered weights, and how they run."""
        plan, inline, losses = self.plan, dict(self.runner.inline), tuple[str, ...]()
        heads = self.heads.texts
        if (why := inline.pop(TRAINING, None)) is not None:
            plan, heads = replace(plan, inline=why, memory=()), ()  # which was that of microbatches
        elif self.runner.engine is not None:
            losses = self.runner.engine.losses()
        evaluations = tuple(f"{name}: {inline_text(why)}" for name, why in inline.items())
        moves = [] if self.runner.context is None else self.runner.context.moves
        return replace(
            plan,
            findings=Findings(
                losses=losses,
                evaluations=evaluations,
                heads=heads,
                gathers=self.zero.gathers,
                slices=tuple(f"{text}; {size_text(num_bytes)}" for text, num_bytes in moves),
            ),
        )
