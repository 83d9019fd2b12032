"""The heads that may run with their loss: linear layers that are blocks, and tables that glue multiplies with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.stage_flow import cut
from lightning_3d.tensor.axis import MeshAxis
from lightning_3d.tensor.vocabulary.fused_heads import FusedHeads, HeadPlan
from lightning_3d.tensor.vocabulary.table_heads import Table, TableHead, find_tables
from lightning_3d.trace.output_uses import find_products
from lightning_3d.trace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class TracedProducts:
    """The calls of glue in a trace that multiply with tables as heads do."""

    tables: Mapping[int, str]
    """Position of a call -> FQN of the table."""
    pp_ranks: Mapping[str, int]
    """FQN of a table -> index on the pp axis of the stage that makes logits of it."""


def traced_products(tables: Mapping[str, Table], plan: Plan, trace: Trace | None) -> TracedProducts:
    """Find them; none without a trace."""
    if trace is None or not tables:
        return TracedProducts(tables={}, pp_ranks={})
    found = find_products(trace, _num_classes(tables))
    stages = cut(trace, plan.stages_of_calls, plan.num_stages).call_stages if found else ()
    return TracedProducts(tables=found, pp_ranks={fqn: plan.stage_ranks[stages[i]] for i, fqn in found.items()})


def _num_classes(tables: Mapping[str, Table]) -> Mapping[str, int]:
    parameters = {fqn: table.parameter for fqn, table in tables.items()}
    return {fqn: max(parameter.shape) for fqn, parameter in parameters.items() if parameter is not None}


def tables_in(module: LightningModule, blocks: Mapping[str, nn.Module], config: ThreeDConfig) -> Mapping[str, Table]:
    """FQN -> table; none where optimizers step inside of a step, as they go by the class of parameters."""
    if config.activations.fused_loss == "never" or not module.automatic_optimization:
        return {}
    return find_tables(module, blocks)


def fused_heads(
    plan: Plan,
    blocks: Mapping[str, nn.Module],
    tables: Mapping[str, Table],
    traced: TracedProducts,
    config: ThreeDConfig,
    mesh: Mesh,
) -> FusedHeads:
    """All heads on this rank.

    Args:
        blocks: FQN -> block.
    """
    heads = [
        TableHead(
            fqn,
            table,
            is_traced=fqn in traced.pp_ranks,
            is_absent=traced.pp_ranks.get(fqn, mesh.pp_rank) != mesh.pp_rank,
        )
        for fqn, table in tables.items()
    ]
    planned = {} if config.activations.fused_loss == "never" else _planned(plan, blocks)
    return FusedHeads(planned, heads, MeshAxis(mesh.axis("tp")) if mesh.shape.tp > 1 else None)


def _planned(plan: Plan, blocks: Mapping[str, nn.Module]) -> dict[str, tuple[nn.Module, HeadPlan]]:
    """The blocks that may be fused with a loss, and what is planned of them."""
    return {
        block.fqn: (
            blocks[block.fqn],
            HeadPlan(tensor=block.tensor, is_recomputed=block.is_recomputed, is_offloaded=block.is_offloaded),
        )
        for block in plan.blocks
    }
