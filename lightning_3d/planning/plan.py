"""The plan: what lies where. Made before anything is done, by pure functions of the model, a trace and the config.

No collectives and no process groups: sizes are ints, so a plan for any number of ranks can be made in one process.
Applying a plan only executes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from torch import nn

from lightning_3d.config.activations import Mode
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.rank_memory import RankMemory, memory_table, size_text
from lightning_3d.planning.inline_mode import inline_text, loss_text
from lightning_3d.planning.optimizer_plan import OptimizerPlan
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.table import tensor_table

Unit = Literal["parameters", "calls", "operations"]
"""The unit in which loads of stages are counted."""

_LONGEST_PATTERN = 12  # blocks in a row that are looked at as one repeated pattern


@dataclass(frozen=True, kw_only=True)
class BlockPlan:
    """Where one block lies."""

    fqn: str
    kind: str
    """Name of its class."""
    num_parameters: int
    stages: tuple[int, ...]
    """Pipeline stage of its first call, its second, ..."""
    tensor: BlockTensorPlan | None
    """How its weights are sharded over tp; None if they are replicated."""
    recompute: Mode = "none"
    """How its backward computes its forward again."""
    is_offloaded: bool = False
    """Whether what it keeps for its backward goes to host memory."""

    @property
    def is_recomputed(self) -> bool:
        """Whether its backward computes its forward again."""
        return self.recompute != "none"


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One pipeline stage."""

    load: int
    """The load that the partition method balances, per microbatch, in the plan's unit."""
    num_sent: int
    """Tensors that it sends to the next stage, per microbatch."""
    bytes_sent: int
    """Their size; about as much comes back as gradients."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Lines on what steps have shown."""

    losses: tuple[str, ...] = ()
    """On each kind of step whose loss, or another value, is no mean over microbatches."""
    evaluations: tuple[str, ...] = ()
    """On each evaluation that has come to run inline."""
    heads: tuple[str, ...] = ()
    """On each head on this rank: whether it is fused with its loss."""
    gathers: tuple[str, ...] = ()
    """On how this rank gathers parameters at ZeRO stage 3."""
    slices: tuple[str, ...] = ()
    """On each kind of call whose operands move between the ranks that share sequences: how, and the bytes sent."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Where everything lies, for all ranks."""

    shape: MeshShape
    zero_stage: int
    schedule: str
    num_microbatches: int
    loss: str
    """How the loss of a batch comes from those of its microbatches: a value of ``pipeline.loss``."""
    blocks: tuple[BlockPlan, ...]
    """In the order of their first call."""
    stages: tuple[StagePlan, ...]
    load_unit: Unit
    """Unit of the stages' loads."""
    stage_ranks: tuple[int, ...]
    """Index on the pp axis of the rank that runs each stage; several stages may lie on one rank."""
    state_ranks: Mapping[str, tuple[int, ...]]
    """FQN of a parameter or of a block's buffer -> indices on the pp axis of the ranks that hold it, ascending. Glue
    buffers are everywhere."""
    ties: Mapping[str, str]
    """FQN -> first FQN of the same tensor, where a tensor has several."""
    used_by_glue: frozenset[str]
    """FQNs of blocks' parameters and buffers that code outside of their block uses in the trace."""
    inline: str | None = None
    """Why steps run in inline mode, if they do."""
    has_side_effects: bool = False
    """Whether the step gives more than numbers, so that the code after its blocks also runs on the whole batch."""
    batch_norms: tuple[str, ...] = ()
    """FQNs of modules that normalise by statistics of what they are given."""
    optimizers: tuple[OptimizerPlan, ...] = ()
    """There once they are made."""
    memory: tuple[RankMemory, ...] = ()
    """The memory of the ranks of the pp axis, where a budget is planned; there once the optimizers are made."""
    findings: Findings = field(default_factory=Findings)

    @property
    def stages_of_calls(self) -> Mapping[str, tuple[int, ...]]:
        """Block FQN -> stages of its calls."""
        return {block.fqn: block.stages for block in self.blocks}

    @property
    def num_stages(self) -> int:
        """Pipeline stages, over all ranks."""
        return len(self.stage_ranks)

    def stages_on(self, pp_rank: int) -> tuple[int, ...]:
        """The stages that a rank of the pp axis runs, ascending."""
        return tuple(stage for stage, rank in enumerate(self.stage_ranks) if rank == pp_rank)

    def blocks_of(self, stage: int) -> tuple[BlockPlan, ...]:
        """The blocks that a stage runs."""
        return tuple(block for block in self.blocks if stage in block.stages)

    def blocks_on(self, pp_rank: int) -> tuple[BlockPlan, ...]:
        """The blocks that a rank of the pp axis runs."""
        stages = set(self.stages_on(pp_rank))
        return tuple(block for block in self.blocks if stages.intersection(block.stages))

    def blocks_in(self, module: nn.Module) -> dict[str, nn.Module]:
        """FQN -> block of this model, in definition order."""
        fqns = {block.fqn for block in self.blocks}
        return {fqn: block for fqn, block in module.named_modules(remove_duplicate=False) if fqn in fqns}

    def ranks_of(self, block: BlockPlan) -> frozenset[int]:
        """Indices on the pp axis of the ranks that run a block."""
        return frozenset(self.stage_ranks[stage] for stage in block.stages)

    def with_blocks(self, change: Callable[[BlockPlan], BlockPlan]) -> Plan:
        """The plan with other blocks in the places of these."""
        return replace(self, blocks=tuple(map(change, self.blocks)))

    @property
    def tensors(self) -> dict[str, BlockTensorPlan]:
        """FQN of a block -> how its weights are sharded over tp, of those that are."""
        planned = ((block.fqn, block.tensor) for block in self.blocks)
        return {fqn: tensor for fqn, tensor in planned if tensor is not None and tensor.is_sharded}

    def holds(self, pp_rank: int, fqn: str) -> bool:
        """Whether a rank of the pp axis holds this parameter or buffer."""
        return fqn not in self.state_ranks or pp_rank in self.state_ranks[fqn]

    def __rich__(self) -> RenderableType:
        """For terminals of 100 columns: a row per stage; with a pipeline, what its loss is; with tensor parallel, a row
        per weight; a line per optimizer.
        """
        tables: list[RenderableType] = [_stage_table(self)]
        if norms := batch_norms_text(self):
            tables.append(norms)
        if self.inline is not None:
            tables.append(inline_text(self.inline))
        elif self.shape.pp > 1:
            tables.append(loss_text(self.loss, has_side_effects=self.has_side_effects))
            tables.extend(self.findings.losses)
        tables.extend(self.findings.evaluations)
        for mode in ("selective", "full"):
            if recomputed := [(block.fqn, block.kind) for block in self.blocks if block.recompute == mode]:
                tables.append(f"recomputed in the backward ({mode}): {', '.join(folded(recomputed))}")
        if offloaded := [(block.fqn, block.kind) for block in self.blocks if block.is_offloaded]:
            tables.append(f"offloaded to host memory until the backward: {', '.join(folded(offloaded))}")
        if self.shape.tp > 1:
            planned = [(block.fqn, block.kind, block.tensor) for block in self.blocks if block.tensor is not None]
            tables.append(tensor_table(planned))
        tables.extend([*self.findings.heads, *self.findings.gathers, *self.findings.slices])
        if self.memory:
            tables.append(memory_table(self.memory))
        tables.extend(map(str, self.optimizers))
        return Group(*tables)


def _stage_table(plan: Plan) -> Table:
    shape, loads = plan.shape, [stage.load for stage in plan.stages]
    schedule = f", {plan.schedule} with {plan.num_microbatches} microbatches" if shape.pp > 1 else ""
    schedule = schedule if plan.inline is None else ", inline"
    imbalance = max(loads) * len(loads) / max(sum(loads), 1)  # 1 is perfect
    table = Table(
        title=f"{shape.text}, ZeRO {plan.zero_stage}{schedule}",
        caption=None
        if plan.num_stages == 1
        else f"the slowest stage has {imbalance:.2f} x the mean load in {plan.load_unit}",
    )
    columns = [_row(plan, stage) for stage in range(plan.num_stages)]
    for name in columns[0]:
        table.add_column(name, justify="left" if name in ("ranks", "blocks") else "right")
    for row in columns:
        table.add_row(*row.values())
    return table


def _row(plan: Plan, number: int) -> dict[str, str]:
    """Column -> text; only columns that say something for this layout."""
    stage, loads = plan.stages[number], [stage.load for stage in plan.stages]
    sums = [sum(block.num_parameters for block in plan.blocks_of(each)) for each in range(plan.num_stages)]
    row = {
        "stage": str(number),
        "ranks": ranks_text(plan, number).rpartition(" ")[2],
        "blocks": "\n".join(folded([(block.fqn, block.kind) for block in plan.blocks_of(number)])),
        "parameters": f"{sums[number]:,}",
    }
    if plan.load_unit != "parameters" or sums != loads:
        row["load"] = _operations_text(stage.load) if plan.load_unit == "operations" else f"{stage.load:,}"
    if plan.num_stages > 1:
        row["share"] = f"{stage.load / max(sum(loads), 1):.0%}"
        row["sends (tensors)"] = f"{size_text(stage.bytes_sent)} ({stage.num_sent})" if stage.num_sent else ""
    return row


def _operations_text(number: int) -> str:
    """With the prefix of its size: ``12.300 G``."""
    power = min(max(len(str(number)) - 1, 9) // 3, 6)
    return f"{number / 1000**power:,.3f} {'GTPE'[power - 3]}"


def batch_norms_text(plan: Plan) -> str | None:
    """The samples that BatchNorm takes its statistics of, unless they are the whole batch."""
    if not plan.batch_norms:
        return None
    num = len(plan.batch_norms)
    norms = f"BatchNorm ({num} modules)" if num > 1 else f"BatchNorm ({plan.batch_norms[0]})"
    if plan.num_microbatches > 1:
        return (
            f"{norms} normalises each microbatch by itself; its running statistics are those of the batch."
            " pipeline.mode=inline normalises the batch, as one process does"
        )
    if plan.shape.size("samples") > 1:
        return f"{norms} normalises each data-parallel rank's batch by itself, as under DDP without sync_batchnorm"
    return None


def ranks_text(plan: Plan, stage: int) -> str:
    """The global ranks that run a stage, such as ``rank 0`` or ``ranks 0-3``."""
    per_stage = plan.shape.world_size // plan.shape.pp
    first = plan.stage_ranks[stage] * per_stage
    return f"rank {first}" if per_stage == 1 else f"ranks {first}-{first + per_stage - 1}"


def folded(blocks: Sequence[tuple[str, str]]) -> list[str]:
    """Blocks, given as (FQN, class), in few lines: what repeats a pattern of classes shares one.

    ``layers.0, layers.1, layers.2`` become ``layers.0 .. 2 (3 x Block)``.
    """
    kinds = [kind for _, kind in blocks]
    lines, start = [], 0
    while start < len(blocks):
        period, repeats = _pattern(kinds, start)
        stop = start + period * repeats
        if repeats == 1:
            lines.append(f"{blocks[start][0]} ({kinds[start]})")
        else:
            pattern = ", ".join(kinds[start : start + period])
            lines.append(f"{_span(blocks[start][0], blocks[stop - 1][0])} ({repeats} x {pattern})")
        start = stop
    return lines


def _pattern(kinds: Sequence[str], start: int) -> tuple[int, int]:
    """(length, repeats) of the pattern that covers the most from ``start`` on; the shortest such."""
    best = (1, 1)
    for period in range(1, min(_LONGEST_PATTERN, (len(kinds) - start) // 2) + 1):
        pattern, repeats = kinds[start : start + period], 1
        while kinds[start + repeats * period : start + (repeats + 1) * period] == pattern:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _span(first: str, last: str) -> str:
    """``a.b.0 .. 3`` for ``a.b.0`` and ``a.b.3``."""
    pairs = zip(first.split("."), last.split("."), strict=False)
    num_shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return f"{first} .. {'.'.join(last.split('.')[num_shared:])}"
