"""Step time of a tensor-parallel block against the same block parallelised by hand in two ways.

    python -m benchmarks.tensor_step

Two processes of one thread, width 512, length 256, batch 4, 8 heads, fp32, forward and backward without an optimizer.
Steps of all alternate in the same processes, so that noise hits all. By hand is either plain local weights between
Megatron's f and g (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053), or torch's `parallelize_module` with a plan
for this block. The bars are ratios of 1.05 against the first and 1.0 against the second. A further row is the block as
``compile`` runs it, by inductor.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.launch import run_ranks
from benchmarks.models import Block
from lightning_3d.compile.blocks import BlockCompiler
from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.block_runner import running
from lightning_3d.tensor import apply_block, plan_block
from lightning_3d.waits import CountedWait

BATCH, LENGTH, WIDTH, HEADS, WARM_UP, STEPS = 4, 256, 512, 8, 5, 60
COLUMN, ROW = ("q", "k", "v", "up"), ("out", "down")


class _EnterColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class _ReduceRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor) -> Tensor:
        partial = partial.contiguous()
        dist.all_reduce(partial)
        return partial

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class MegatronBlock(Block):
    """The block with this rank's share of the weights."""

    def __init__(self, dense: Block) -> None:
        super().__init__(WIDTH, HEADS)
        self.load_state_dict(dense.state_dict())
        rank, size = dist.get_rank(), dist.get_world_size()
        self.num_heads = HEADS // size
        for name in (*COLUMN, *ROW):
            linear = getattr(self, name)
            dim = 0 if name in COLUMN else 1
            linear.weight = nn.Parameter(linear.weight.detach().chunk(size, dim)[rank].clone())
            if name in COLUMN:
                linear.bias = nn.Parameter(linear.bias.detach().chunk(size)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = _enter(self.norm1(x))
        split = (batch, length, self.num_heads, width // HEADS)
        q, k, v = (projection(h).view(split).transpose(1, 2) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + (_reduce(F.linear(y, self.out.weight)) + self.out.bias)
        h = F.gelu(self.up(_enter(self.norm2(x))))
        return x + (_reduce(F.linear(h, self.down.weight)) + self.down.bias)


def _enter(x: Tensor) -> Tensor:
    return cast(Tensor, _EnterColumns.apply(x))


def _reduce(partial: Tensor) -> Tensor:
    return cast(Tensor, _ReduceRows.apply(partial))


class TorchBlock(Block):
    """The block for `parallelize_module`, whose activations between column and row layers are local."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        split = (batch, length, -1, width // HEADS)
        q, k, v = (projection(h).view(split).transpose(1, 2) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x))))  # type: ignore[no-any-return]


def _by_torch(dense: Block, mesh: DeviceMesh) -> nn.Module:
    block = TorchBlock(WIDTH, HEADS)
    block.load_state_dict(dense.state_dict())
    plan = {name: ColwiseParallel() for name in COLUMN} | {name: RowwiseParallel() for name in ROW}
    return parallelize_module(block, mesh, plan)


def _by_lightning_3d(dense: Block, mesh: DeviceMesh, compiler: BlockCompiler | None = None) -> nn.Module:
    block = copy.deepcopy(dense)
    plan = plan_block(block, (torch.empty(BATCH, LENGTH, WIDTH, device="meta"),), {}, size=mesh.size())
    apply_block(block, plan, mesh)
    running(block).compiled = None if compiler is None else compiler.of(block)
    return block


def _step(block: nn.Module, x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Seconds, output and the gradient of the input."""
    block.zero_grad()
    x = x.detach().requires_grad_()
    dist.barrier()
    start = time.perf_counter()
    output = block(x)
    output.backward(torch.ones_like(output))
    dist.barrier()
    assert x.grad is not None
    return time.perf_counter() - start, output.detach(), x.grad


def measure() -> dict[str, list[float]]:
    """Seconds of every step by way of parallelising; checks that all compute the same."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    dense, x = Block(WIDTH, HEADS), torch.randn(BATCH, LENGTH, WIDTH)
    compiler = BlockCompiler(CompileConfig(), mesh, compiling := CountedWait())
    blocks = {
        "lightning_3d": _by_lightning_3d(dense, mesh),
        "layers by hand": MegatronBlock(dense),
        "parallelize_module": _by_torch(dense, mesh),
        "lightning_3d, compiled": _by_lightning_3d(dense, mesh, compiler),
    }
    _, output, gradient = _step(dense, x)
    for block in blocks.values():
        _, sharded_output, sharded_gradient = _step(block, x)
        torch.testing.assert_close(sharded_output, output, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(sharded_gradient, gradient, rtol=1e-4, atol=1e-4)
        held = sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in block.parameters())
        assert held < 0.51 * sum(p.numel() for p in dense.parameters())
    assert compiling.num == 1
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    order = list(blocks)
    for _ in range(WARM_UP + STEPS):
        for name in order:
            seconds[name].append(_step(blocks[name], x)[0])
        order.append(order.pop(0))  # so that each follows each of the others
    return {name: times[WARM_UP:] for name, times in seconds.items()}


def main() -> None:
    """Print the table."""
    seconds = run_ranks(measure, 2)
    ours = seconds["lightning_3d"]
    table = Table("", "median ms", title=f"one block, 2 processes, {STEPS} steps each")
    table.add_column("lightning_3d / it,\nof medians")
    table.add_column("lightning_3d / it,\nmedian")
    for name, times in seconds.items():
        ratios = statistics.median(a / b for a, b in zip(ours, times, strict=True))
        medians = statistics.median(ours) / statistics.median(times)
        table.add_row(name, f"{statistics.median(times) * 1e3:.1f}", f"{medians:.3f}", f"{ratios:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
