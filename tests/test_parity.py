"""The one law over a table of layouts: same losses, gradient norms, metrics and weights as one process, and really
sharded as planned.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest

from tests.models import TinyGPT, TinyMLP, features
from tests.parity import Job, Layout, LayoutRun, ReferenceRun, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

GPT = Job()
UNTIED = Job(model=partial(TinyGPT, tied=False))
CLIPPED = Job(gradient_clip_val=0.3, accumulate_grad_batches=2)
MLP = Job(model=TinyMLP, data=features)

SHARDED = replace(CLIPPED, sees_gradients=False)
"""Gradients stay sharded through clipping and accumulation, as nothing looks at them."""

MULTI = ("interleaved", "interleaved_zero_bubble", "zbv")

TABLE = [
    (GPT, Layout()),
    # two processes
    *((GPT, Layout(dp=2, zero=stage)) for stage in (0, 1, 2, 3)),
    (GPT, Layout(pp=2, schedule="gpipe", num_microbatches=4)),
    (GPT, Layout(pp=2, schedule="1f1b", num_microbatches=4)),
    (GPT, Layout(pp=2, num_microbatches=3)),  # microbatches of unequal size
    (GPT, Layout(pp=2, partition="uniform")),
    (GPT, Layout(pp=2, partition="type:Attention|Embedding")),  # residuals and MLPs become glue and blocks of their own
    (UNTIED, Layout(pp=2)),
    (MLP, Layout(pp=2)),
    (GPT, Layout(tp=2)),
    (UNTIED, Layout(tp=2)),
    (CLIPPED, Layout(dp=2, zero=1)),
    (CLIPPED, Layout(pp=2)),
    (CLIPPED, Layout(tp=2)),
    *((SHARDED, Layout(dp=2, zero=stage)) for stage in (0, 1, 2)),
    # four processes
    (GPT, Layout(dp=4, zero=3)),
    (GPT, Layout(pp=4, num_microbatches=4)),
    (GPT, Layout(tp=4)),
    *((GPT, Layout(pp=2, dp=2, zero=stage)) for stage in (0, 1, 2, 3)),
    *((GPT, Layout(dp=2, tp=2, zero=stage)) for stage in (0, 1, 2, 3)),
    (GPT, Layout(pp=2, tp=2)),
    (CLIPPED, Layout(pp=2, dp=2, zero=2)),
    *((SHARDED, Layout(pp=2, dp=2, zero=stage)) for stage in (1, 2)),
    *((SHARDED, Layout(dp=2, tp=2, zero=stage)) for stage in (1, 2)),
    # several stages on each rank
    *((GPT, Layout(pp=2, schedule=schedule, num_microbatches=4)) for schedule in MULTI),
    *((CLIPPED, Layout(pp=2, dp=2, zero=3, schedule=schedule, num_microbatches=2)) for schedule in MULTI),
    *((SHARDED, Layout(pp=2, dp=2, zero=2, schedule=schedule, num_microbatches=2)) for schedule in MULTI),
    *((UNTIED, Layout(pp=2, tp=2, schedule=schedule)) for schedule in MULTI),
    (GPT, Layout(pp=4, schedule="interleaved", num_microbatches=4, partition="uniform")),
    # eight processes
    *((GPT, Layout(pp=2, dp=2, tp=2, zero=stage)) for stage in (0, 1, 2, 3)),
    (CLIPPED, Layout(pp=2, dp=2, tp=2, zero=1, num_microbatches=2)),
]


def _is_in_matrix(job: Job, layout: Layout) -> bool:
    """Stages of ZeRO and schedules that others of the same job and axes stand for."""
    if layout.schedule in ("interleaved", "interleaved_zero_bubble"):
        return layout.world_size > 2
    num_axes = [layout.pp, layout.dp, layout.tp].count(2)
    if job is GPT:
        return num_axes > 1 and layout.dp > 1 and (layout.zero < 3 or num_axes == 2)
    if job is CLIPPED:
        return num_axes == 2 and layout.schedule == "1f1b"
    return job is SHARDED and num_axes > 1 and layout.zero == 1


def _name(job: Job, layout: Layout) -> str:
    jobs = {"gpt": GPT, "untied": UNTIED, "clipped": CLIPPED, "sharded": SHARDED, "mlp": MLP}
    name = next(name for name, known in jobs.items() if known is job)
    return f"{name}-{layout}-{layout.partition}"


@cache
def _reference(name: str) -> ReferenceRun:
    return run_reference({"gpt": GPT, "untied": UNTIED, "clipped": CLIPPED, "sharded": SHARDED, "mlp": MLP}[name])


@pytest.mark.parametrize(
    ("job", "layout"), some_in_matrix(TABLE, _is_in_matrix), ids=[_name(job, layout) for job, layout in TABLE]
)
def test_layout_equals_one_process(workers: WorkerPools, job: Job, layout: Layout) -> None:
    reference = _reference(_name(job, layout).partition("-")[0])
    result = run_layout(workers, job, layout)
    assert_parity(reference, result, tolerance=1e-5)
    assert_held_as_planned(reference, result, layout)


def assert_held_as_planned(reference: ReferenceRun, result: LayoutRun, layout: Layout) -> None:
    """Parameters and optimizer state are cut by pp and tp; from ZeRO stage 1 on the state (two tensors of AdamW) and at
    stage 3 the parameters, too, by dp.
    """
    state_shards = 1 if layout.zero == 0 else layout.dp
    parameter_shards = layout.dp if layout.zero == 3 else 1
    ranks_per_stage = layout.dp * layout.tp
    for fqn, num_elements in reference.parameters.items():
        stages = {rank // ranks_per_stage for rank, held in enumerate(result.held) if fqn in held.parameters}
        expected = num_elements // (layout.tp if _is_tensor_parallel(fqn) else 1)
        tied = fqn == "tokens.weight" and "head.weight" not in reference.parameters
        apart = tied and layout.pp > 1 and layout.schedule != "zbv"  # which has the first and last stage on one rank
        assert len(stages) == (2 if apart else 1), f"{fqn} is on stages {stages}"
        for rank, held in enumerate(result.held):
            if rank // ranks_per_stage in stages:
                assert held.parameters[fqn] == expected // parameter_shards, f"{fqn} on rank {rank}"
                assert held.optimizer_state[fqn] == 2 * expected // state_shards, f"state of {fqn} on rank {rank}"
            else:
                assert fqn not in held.optimizer_state, f"state of {fqn} on rank {rank}"
    for stage in range(layout.pp):
        assert result.held[stage * ranks_per_stage].parameters, f"stage {stage} holds nothing"


def _is_tensor_parallel(fqn: str) -> bool:
    """What Megatron's plan shards in TinyGPT: column weights with their biases, row weights without, the vocabulary."""
    column = ("attention.q.", "attention.k.", "attention.v.", "mlp.0.")
    row = ("attention.out.weight", "mlp.2.weight")
    return any(part in fqn for part in (*column, *row, "tokens.weight", "head.weight"))
