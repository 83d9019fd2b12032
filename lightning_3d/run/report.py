"""The share of the model that every rank holds, gathered for a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelSummary
from lightning_utilities.core.rank_zero import rank_zero_info
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.distributed.device_memory import host_memory
from lightning_3d.distributed.mesh import MeshCoordinate
from lightning_3d.memory.rank_memory import StaticMemory
from lightning_3d.planning.plan import batch_norms_text
from lightning_3d.planning.summary import layout_text
from lightning_3d.run.context import RunContext
from lightning_3d.run.parallel.parallel_model import ParallelModel
from lightning_3d.torch_internals.lightning_helpers import callbacks_of
from lightning_3d.zero.shard import plain

_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's share."""

    rank: int
    coordinate: MeshCoordinate
    num_parameters: int
    """Elements of parameters held between steps; tied ones once."""
    num_optimizer_elements: int
    """Elements of optimizer state tensors."""
    optimizer_bytes: int
    """Bytes of optimizer state tensors on the device."""
    offloaded_bytes: int
    """Bytes of those in host memory or files instead."""
    peak_memory: int
    """Bytes: allocated on the accelerator, or resident in the process without one."""


def gather_reports(context: RunContext, optimizers: Iterable[Optimizer]) -> list[RankReport]:
    """The reports of all ranks, by rank; every rank calls it."""
    offloads = context.config.zero.offload_optimizer != "none"
    state = [t for optimizer in optimizers for values in optimizer.state.values() for t in values.values()]
    tensors = [plain(t) for t in state if isinstance(t, Tensor)]
    offloaded = [t for t in tensors if offloads and t.device.type == "cpu"]
    mine = RankReport(
        rank=dist.get_rank(),
        coordinate=context.mesh.coordinate,
        num_parameters=_num_elements(context.module.parameters()),
        num_optimizer_elements=_num_elements(t for t in state if isinstance(t, Tensor) and t.ndim > 0),
        optimizer_bytes=sum(t.nbytes for t in tensors) - sum(t.nbytes for t in offloaded),
        offloaded_bytes=sum(t.nbytes for t in offloaded),
        peak_memory=_peak_memory(context.device),
    )
    everyone: list[RankReport] = [mine] * context.mesh.shape.world_size
    dist.all_gather_object(everyone, mine)
    return everyone


def tell_layout(context: RunContext, parallel: ParallelModel, optimizers: Iterable[Optimizer]) -> None:
    """Say once what layout is running, where the Trainer shows a summary of the model; that norms see microbatches
    alone is said in any case. Every rank calls it.
    """
    if context.mesh.shape.world_size == 1 or parallel.is_told:
        return
    parallel.is_told = True
    shows = any(isinstance(callback, ModelSummary) for callback in callbacks_of(context.trainer))
    if not context.strategy.broadcast(shows):
        if parallel.plan.num_microbatches > 1 and (norms := batch_norms_text(parallel.plan)):
            rank_zero_info(norms)
        return
    held = parallel.held(context.config, optimizers)
    rank_zero_info(layout_text(parallel.plan, StaticMemory.most(held.of_ranks(None, context.device)), held.num_sharing))


def report_table(reports: Sequence[RankReport]) -> Table:
    """The reports as a table for people."""
    table = Table(title="what each rank holds")
    offloads = any(report.offloaded_bytes for report in reports)
    columns = ["rank", "stage", "data", "tensor", "parameters", "optimizer state", "peak memory"]
    for column in [*columns, *(["offloaded"] if offloads else [])]:
        table.add_column(column, justify="right")
    for report in reports:
        at = report.coordinate
        table.add_row(
            str(report.rank),
            str(at.pp),
            str(at.dp),
            str(at.tp),
            f"{report.num_parameters:,}",
            f"{report.num_optimizer_elements:,}",
            f"{report.peak_memory / _MIB:,.0f} MiB",
            *([f"{report.offloaded_bytes / _MIB:,.0f} MiB"] if offloads else []),
        )
    return table


def _num_elements(tensors: Iterable[Tensor]) -> int:
    return sum(local.numel() for local in map(plain, tensors) if not local.is_meta)


def _peak_memory(device: torch.device) -> int:
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_allocated(device))
    return host_memory()[1]
