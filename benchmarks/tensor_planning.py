"""Time that tensor parallel adds to the start of training: planning, and the proof on all distinct blocks.

    python -m benchmarks.tensor_planning

48 blocks of 2 classes on 2 processes; the bar for both together is 10 s. And one block that is as large as a stage of
ResNet-152, 36 bottlenecks, planned alone; the bar is 5 s.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from benchmarks.launch import run_ranks
from benchmarks.models import GPT, Block, random_tokens
from lightning_3d import ThreeDConfig
from lightning_3d.distributed.mesh import build_mesh, resolve_mesh_shape
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.planning.observer import ExampleStep, Observer
from lightning_3d.planning.planner import decide
from lightning_3d.run.parallel.tensor_parallel import prove_blocks
from lightning_3d.tensor import plan_block
from lightning_3d.tensor.plan.known_choices import FOLDER

NUM_BLOCKS, WIDTH, HEADS = 48, 256, 8


class GatedBlock(Block):
    """A block with a gated MLP."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.gate = nn.Linear(width, 4 * width)

    def mlp(self, h: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(h)) * self.up(h))  # type: ignore[no-any-return]


class Alternating(GPT):
    """A GPT whose blocks are of two classes in turn."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH, num_layers=0)
        classes = (Block, GatedBlock)
        self.blocks = nn.ModuleList(classes[index % 2](WIDTH, HEADS) for index in range(NUM_BLOCKS))


class Bottleneck(nn.Module):
    """ResNet's: a 1x1 convolution to fewer channels, a 3x3 one, and one back, each with its norm."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        sizes = ((channels, inner, 1), (inner, inner, 3), (inner, channels, 1))
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2, bias=False) for a, b, k in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _ in sizes)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            y = norm(convolution(F.relu(y) if index else y))
        return F.relu(x + y)


def plan_stage() -> float:
    """Seconds of planning 36 bottlenecks of 1024 channels as one block."""
    with torch.device("meta"):
        stage = nn.Sequential(*(Bottleneck(1024, 256) for _ in range(36)))
        images = torch.empty(4, 1024, 14, 14, requires_grad=True)
    start = time.perf_counter()
    assert plan_block(stage, (images,), {}, size=2).is_sharded
    return time.perf_counter() - start


def measure() -> dict[str, float]:
    """Seconds of the planning and of the proof of all blocks."""
    torch.manual_seed(0)  # the same weights on both ranks
    model, device, config = Alternating(), torch.device("cpu"), ThreeDConfig(tensor_parallel_size=2)
    mesh = build_mesh(resolve_mesh_shape(config, 2), zero_stage=config.zero.stage, device_type=device.type)
    step = ExampleStep(name="training_step", microbatch=next(iter(random_tokens(1, 4, 64))), modes=nullcontext)
    observed = Observer(model, step, device, StepEffects).observe(config, mesh.shape)
    start = time.perf_counter()
    plan = decide(observed, config, mesh.shape, device)
    planned = time.perf_counter()
    plan = prove_blocks(plan, observed, mesh, config.tensor, device, compiled=lambda block: None)
    proved = time.perf_counter()
    blocks = [block for block in plan.blocks if block.fqn.startswith("blocks.")]
    assert sum(block.tensor is not None and block.tensor.is_sharded for block in blocks) == NUM_BLOCKS
    return {"planning": planned - start, "proof": proved - planned}


def main() -> None:
    """Print the table, of plans that are searched for."""
    os.environ[FOLDER] = ""
    seconds = run_ranks(measure, 2)
    table = Table("", "", title=f"{NUM_BLOCKS} blocks of 2 classes, 2 processes")
    for name, value in seconds.items():
        table.add_row(name, f"{value:.2f} s")
    table.add_row("both", f"{sum(seconds.values()):.2f} s")
    table.add_row("a stage of 36 bottlenecks", f"{plan_stage():.2f} s")
    Console().print(table)


if __name__ == "__main__":
    main()
