"""Step time of pipeline 2 x data 2 against torch's pipeline written by hand, with DDP or FSDP2 on every stage.

    python -m benchmarks.pipeline_data_step

Four processes, 1F1B, AdamW. In every round each contender trains for some steps, in turn; a figure is the median over
the rounds of the ratio of its median step to its peer's in the same round. The bars: 1.0 of DDP at stage 1, 1.0 of
FSDP2 at stage 3.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from benchmarks.data_parallel_step import Clock, train
from benchmarks.models import GPT, random_tokens
from benchmarks.pipeline_step import next_token_loss
from benchmarks.rounds import Contenders, compare
from lightning_3d import ThreeDStrategy

RANKS, BATCH, LENGTH, VOCABULARY, MICROBATCHES, WARM_UP, STEPS, ROUNDS = 4, 8, 128, 8192, 4, 3, 8, 3


def _by_hand(*, shards: bool) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    model, stage_index = GPT(VOCABULARY), mesh["pp"].get_local_rank()
    half = len(model.blocks) // 2
    first = nn.Sequential(model.tokens, *model.blocks[:half])
    last = nn.Sequential(*model.blocks[half:], model.norm, model.head)
    module: nn.Module = (first, last)[stage_index]
    if shards:
        for layer in module.children():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
    else:
        module = DistributedDataParallel(module, process_group=mesh["dp"].get_group())
    stage = PipelineStage(module, stage_index, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=next_token_loss)
    optimizer, clock = torch.optim.AdamW(module.parameters(), lr=1e-3), Clock(WARM_UP)
    for tokens, targets in random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY):
        clock.tick()
        optimizer.zero_grad()
        if stage_index == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets)
        optimizer.step()
    return clock.seconds()


def _ours(stage: int) -> float:
    strategy = ThreeDStrategy(2, zero={"stage": stage}, pipeline={"num_microbatches": MICROBATCHES})
    return train(strategy, RANKS, GPT(VOCABULARY), random_tokens(WARM_UP + STEPS, BATCH, LENGTH, VOCABULARY), WARM_UP)


CONTENDERS: Contenders = {
    "by hand, DDP": partial(_by_hand, shards=False),
    "stage 1": partial(_ours, 1),
    "by hand, FSDP2": partial(_by_hand, shards=True),
    "stage 3": partial(_ours, 3),
    "stage 0": partial(_ours, 0),
    "stage 2": partial(_ours, 2),
}
BARS = (
    ("stage 1", "by hand, DDP", 1.0),
    ("stage 3", "by hand, FSDP2", 1.0),
    ("stage 0", "by hand, DDP", None),
    ("stage 2", "by hand, DDP", None),
)


def main() -> None:
    """Print the table."""
    compare(CONTENDERS, BARS, num_ranks=RANKS, num_rounds=ROUNDS, title="pipeline 2 x data 2")


if __name__ == "__main__":
    main()
