"""The plan: what lies where. Made before anything is done, by pure functions of the model, a trace and the config.

No collectives and no process groups: sizes are ints, so a plan for any number of ranks can be made in one process.
Applying a plan only executes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from torch import Tensor, nn

from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.memory.rank_memory import RankMemory, memory_table, size_text
from lightning_3d.planning.assignment import StagePlan, assign_stages
from lightning_3d.planning.inline_mode import inline_text, loss_text
from lightning_3d.planning.loads import Unit, num_parameters
from lightning_3d.planning.optimizer_plan import OptimizerPlan
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.table import tensor_table
from lightning_3d.torch_internals.modules import BatchNorm, named_state
from lightning_3d.trace.trace import Trace

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
    evaluations: tuple[str, ...] = ()
    """A line for each evaluation that has come to run inline; there once steps have shown it."""
    has_side_effects: bool = False
    """Whether the step gives more than numbers, so that the code after its blocks also runs on the whole batch."""
    batch_norms: tuple[str, ...] = ()
    """FQNs of modules that normalise by statistics of what they are given."""
    optimizers: tuple[OptimizerPlan, ...] = ()
    """There once they are made."""
    memory: tuple[RankMemory, ...] = ()
    """The memory of the ranks of the pp axis, where a budget is planned; there once the optimizers are made."""
    losses: tuple[str, ...] = ()
    """A line for each kind of step whose loss, or another value, is no mean over microbatches; there once steps have
    shown it."""
    heads: tuple[str, ...] = ()
    """A line for each head on this rank: whether it is fused with its loss, once steps have shown it."""
    gathers: tuple[str, ...] = ()
    """Lines on how this rank gathers parameters at ZeRO stage 3; there once steps have shown it."""

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

    @property
    def recomputing_stages(self) -> frozenset[int]:
        """The stages that run a block whose backward computes its forward again.

        Torch would do so for each group of weights anew where a schedule splits the backward.
        """
        return frozenset(stage for block in self.blocks if block.is_recomputed for stage in block.stages)

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

    def with_recomputation(self, modes: Mapping[str, Mode]) -> Plan:
        """The plan with other recomputation: block FQN -> how; the others are not recomputed."""
        return replace(
            self, blocks=tuple(replace(block, recompute=modes.get(block.fqn, "none")) for block in self.blocks)
        )

    def with_tensor(self, tensor: Mapping[str, BlockTensorPlan | None]) -> Plan:
        """The plan with other shardings of some blocks, by FQN."""
        blocks = (replace(block, tensor=tensor[block.fqn]) if block.fqn in tensor else block for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def holds(self, pp_rank: int, fqn: str) -> bool:
        """Whether a rank of the pp axis holds this parameter or buffer."""
        return fqn not in self.state_ranks or pp_rank in self.state_ranks[fqn]

    @property
    def imbalance(self) -> float:
        """Load of the slowest stage over the mean; 1 is perfect."""
        loads = [stage.load for stage in self.stages]
        return max(loads) * len(loads) / max(sum(loads), 1)

    def __rich__(self) -> RenderableType:
        """For terminals of 100 columns: a row per stage; with a pipeline, what its loss is; with tensor parallel, a row
        per weight; a line per optimizer.
        """
        tables: list[RenderableType] = [self._stage_table()]
        if self.batch_norms and self.num_microbatches > 1:
            others = f" and {len(self.batch_norms) - 1} more" if self.batch_norms[1:] else ""
            norms = f"{self.batch_norms[0]}{others}"
            tables.append(f"BatchNorm normalises by microbatch, its running statistics are the batch's: {norms}")
        if self.inline is not None:
            tables.append(inline_text(self.inline))
        elif self.shape.pp > 1:
            tables.append(loss_text(self.loss, has_side_effects=self.has_side_effects))
            tables.extend(self.losses)
        tables.extend(self.evaluations)
        for mode in ("selective", "full"):
            if recomputed := [(block.fqn, block.kind) for block in self.blocks if block.recompute == mode]:
                tables.append(f"recomputed in the backward ({mode}): {', '.join(folded(recomputed))}")
        if offloaded := [(block.fqn, block.kind) for block in self.blocks if block.is_offloaded]:
            tables.append(f"offloaded to host memory until the backward: {', '.join(folded(offloaded))}")
        if self.shape.tp > 1:
            planned = [(block.fqn, block.kind, block.tensor) for block in self.blocks if block.tensor is not None]
            tables.append(tensor_table(planned))
        tables.extend(self.heads)
        tables.extend(self.gathers)
        if self.memory:
            tables.append(memory_table(self.memory))
        tables.extend(map(str, self.optimizers))
        return Group(*tables)

    def _stage_table(self) -> Table:
        shape = self.shape
        schedule = f", {self.schedule} with {self.num_microbatches} microbatches" if shape.pp > 1 else ""
        schedule = schedule if self.inline is None else ", inline"
        table = Table(
            title=f"{shape.text}, ZeRO {self.zero_stage}{schedule}",
            caption=None
            if self.num_stages == 1
            else f"the slowest stage has {self.imbalance:.2f} x the mean load in {self.load_unit}",
        )
        columns = [self._row(stage) for stage in range(self.num_stages)]
        for name in columns[0]:
            table.add_column(name, justify="left" if name in ("ranks", "blocks") else "right")
        for row in columns:
            table.add_row(*row.values())
        return table

    @property
    def _shows_loads(self) -> bool:
        """Whether the loads are anything but the numbers of parameters."""
        sums = [sum(block.num_parameters for block in self.blocks_of(stage)) for stage in range(self.num_stages)]
        return self.load_unit != "parameters" or sums != [stage.load for stage in self.stages]

    def ranks_text(self, stage: int) -> str:
        """The global ranks that run a stage, such as ``rank 0`` or ``ranks 0-3``."""
        per_stage = self.shape.world_size // self.shape.pp
        first = self.stage_ranks[stage] * per_stage
        return f"rank {first}" if per_stage == 1 else f"ranks {first}-{first + per_stage - 1}"

    def _row(self, stage: int) -> dict[str, str]:
        """Column -> text; only columns that say something for this layout."""
        blocks, plan = self.blocks_of(stage), self.stages[stage]
        row = {
            "stage": str(stage),
            "ranks": self.ranks_text(stage).rpartition(" ")[2],
            "blocks": "\n".join(folded([(block.fqn, block.kind) for block in blocks])),
            "parameters": f"{sum(block.num_parameters for block in blocks):,}",
        }
        if self._shows_loads:
            row["load"] = f"{plan.load / 1e9:,.3f} G" if self.load_unit == "operations" else f"{plan.load:,}"
        if self.num_stages > 1:
            row["share"] = f"{plan.load / max(sum(stage.load for stage in self.stages), 1):.0%}"
            row["sends (tensors)"] = f"{size_text(plan.bytes_sent)} ({plan.num_sent})" if plan.num_sent else ""
        return row


def make_plan(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    trace: Trace | None,
    config: ThreeDConfig,
    shape: MeshShape,
    device: torch.device,
    inline: str | None = None,
) -> Plan:
    """Assign blocks to stages and weights to shards.

    Args:
        module: The whole model.
        blocks: From ``find_blocks``.
        trace: One step of the model; needed if there is more than one stage or tensor-parallel rank.
        device: Where blocks will run, to count their time and memory.
        inline: Why steps run in inline mode, if they do.

    Raises:
        PlanError: the blocks can't be shared out among the stages.
    """
    stage_ranks = config.pipeline.stage_ranks(shape.pp)
    assignment = assign_stages(module, blocks, trace, config, shape, device)
    stages = assignment.stages_of_calls
    order = sorted(blocks, key=lambda fqn: stages[fqn][0])
    activations = config.activations
    mode: Mode = "none" if activations.recompute == "auto" else activations.recompute
    chosen = chosen_blocks({fqn: blocks[fqn] for fqn in order}, activations)
    ranks = {fqn: {stage_ranks[stage] for stage in of_calls} for fqn, of_calls in stages.items()}
    state_ranks, ties = _place_state(module, blocks, ranks, trace if inline is None else None, shape.pp)
    return Plan(
        shape=shape,
        zero_stage=config.zero.stage,
        schedule=config.pipeline.schedule,
        num_microbatches=config.num_microbatches,
        loss=config.pipeline.loss,
        blocks=tuple(
            BlockPlan(
                fqn=fqn,
                kind=type(blocks[fqn]).__name__,
                num_parameters=num_parameters(blocks[fqn]),
                stages=stages[fqn],
                tensor=None,
                recompute=mode if fqn in chosen else "none",
                is_offloaded=activations.offload and fqn in chosen,
            )
            for fqn in order
        ),
        stages=assignment.stages,
        load_unit=assignment.unit,
        stage_ranks=stage_ranks,
        state_ranks=state_ranks,
        ties=ties,
        used_by_glue=_used_by_glue(trace),
        inline=inline,
        has_side_effects=trace is not None and trace.has_side_effects,
        batch_norms=tuple(fqn for fqn, inner in module.named_modules() if _normalises_alone(inner)),
    )


def _place_state(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    ranks: Mapping[str, set[int]],
    trace: Trace | None,
    pp: int,
) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """A tensor lies on the ranks of the blocks that own it, whatever its names, and on all if glue uses it in a trace.

    Without a trace it lies with its block alone.
    """
    owners: dict[nn.Module, set[int]] = {}  # a module that several blocks share lies with each of them
    for fqn, block in blocks.items():
        for inner in block.modules():
            owners.setdefault(inner, set()).update(ranks[fqn])
    everywhere = set(range(pp))
    used_by_glue = _used_by_glue(trace)
    names: dict[Tensor, list[str]] = {}
    held: dict[Tensor, set[int]] = {}
    of_blocks: dict[Tensor, set[int]] = {}
    for fqn, tensor, owner in named_state(module):
        if owner not in owners and not isinstance(tensor, nn.Parameter):
            continue
        names.setdefault(tensor, []).append(fqn)
        place = owners[owner] if owner in owners and fqn not in used_by_glue else everywhere
        held.setdefault(tensor, set()).update(place)
        if trace is None and owner in owners:
            of_blocks.setdefault(tensor, set()).update(place)
    held |= of_blocks
    state_ranks = {fqn: tuple(sorted(held[tensor])) for tensor, fqns in names.items() for fqn in fqns}
    ties = {fqn: fqns[0] for fqns in names.values() for fqn in fqns if len(fqns) > 1}
    return state_ranks, ties


def _normalises_alone(module: nn.Module) -> bool:
    """Whether it is a BatchNorm that is trained, without communication."""
    return isinstance(module, BatchNorm) and module.training and not isinstance(module, nn.SyncBatchNorm)


def _used_by_glue(trace: Trace | None) -> frozenset[str]:
    return frozenset(fqn for call in (trace.calls if trace else ()) for fqn in call.parameters)


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
