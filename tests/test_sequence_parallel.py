"""Sequence-parallel regions: the numbers of one process, the planned collectives, and activations cut by the size."""

from __future__ import annotations

import copy
import gc
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.config.compile import CompileConfig
from lightning_3d.planning.memory.live_bytes import LiveBytes
from lightning_3d.tensor import BlockCompiler, apply_block, plan_block, verify_block
from tests.collectives import Collectives, by_kind, planned
from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

SHAPE = (2, 8, 32)  # (B, T, D)


class DropoutBlock(Block):
    """Drops in the residuals, which are sequence-parallel."""

    def __init__(self) -> None:
        super().__init__(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.5, self.training)
        output: Tensor = x + F.dropout(self.mlp(self.norm2(x)), 0.5, self.training)
        return output


class FlatBlock(nn.Module):
    """Projects (B T, D), where no sequence is left, and adds a plain table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.positions = nn.Parameter(torch.randn(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x + self.positions).reshape(-1, 32)
        output: Tensor = x + self.down(F.gelu(self.up(hidden))).view(x.shape)
        return output


def _saved_bytes(block: nn.Module, inputs: Tensor) -> int:
    """Bytes of all storages that the forward keeps for the backward, except parameters'."""
    own = {_local(parameter).untyped_storage().data_ptr() for parameter in block.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = _local(tensor).untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = block(inputs)
    total = sum(kept.values())
    output.sum().backward()
    return total


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _run_block(size: int) -> dict[str, Any]:
    torch.manual_seed(0)
    mesh, block, inputs = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)), Block(32, 4), torch.randn(SHAPE)
    inputs.requires_grad_()
    plan = plan_block(block, (inputs,), {}, size=size, sequence_parallel=True)
    proof = verify_block(block, plan, (inputs,), {}, mesh)
    sharded = copy.deepcopy(block)
    apply_block(sharded, plan, mesh)
    leaf = inputs.detach().clone().requires_grad_()
    with Collectives() as forward:
        output = sharded(leaf)
    with Collectives() as backward:
        output.sum().backward()
    return {
        "plan": plan,
        "proof": proof,
        "forward": forward.sent,
        "backward": backward.sent,
        "dense": _saved_bytes(block, inputs.detach().clone().requires_grad_()),
        "sliced": _saved_bytes(sharded, inputs.detach().clone().requires_grad_()),
    }


@pytest.mark.parametrize("size", [2, 4])
def test_block_communicates_as_planned_and_keeps_its_part_of_the_activations(workers: WorkerPools, size: int) -> None:
    for rank in workers(size).run(_run_block, size):
        plan = rank["plan"]
        assert rank["proof"].passed
        assert plan.is_sequence_parallel
        # Two regions, each entered by an all-gather and left by a reduce-scatter, and the block's output.
        assert by_kind(rank["forward"]) == {"all-gather": 3, "reduce-scatter": 2}
        assert rank["forward"] == planned(plan, is_backward=False)
        # Two more all-gathers for what was not kept; all-reduces of norms' and row biases' gradients.
        assert by_kind(rank["backward"]) == {"all-gather": 5, "reduce-scatter": 2, "all-reduce": 6}
        assert rank["backward"] == planned(plan, is_backward=True)
        assert rank["sliced"] <= rank["dense"] * (1 / size + 0.03)


def _masks_differ() -> tuple[bool, float]:
    torch.manual_seed(0)
    mesh, block = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), DropoutBlock()
    inputs = torch.zeros(SHAPE)
    nn.init.zeros_(block.attention.out.weight)
    nn.init.ones_(block.attention.out.bias)
    nn.init.zeros_(block.mlp[2].weight)
    nn.init.zeros_(block.mlp[2].bias)
    apply_block(block, plan_block(block, (inputs,), {}, size=2, sequence_parallel=True), mesh)
    first, second = block(inputs).chunk(2, dim=1)
    return not torch.equal(first, second), float((first == 0).float().mean())


def test_dropout_differs_between_slices(workers: WorkerPools) -> None:
    for differ, share in workers(2).run(_masks_differ):
        assert differ
        assert 0.3 < share < 0.7


def _prove_flat() -> tuple[str, bool]:
    torch.manual_seed(0)
    mesh, block, inputs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), FlatBlock(), torch.randn(SHAPE)
    plan = plan_block(block, (inputs,), {}, size=2, sequence_parallel=True)
    return str(verify_block(block, plan, (inputs,), {}, mesh)), plan.weight("down.weight").role == "row"


def test_what_leaves_the_sequence_is_gathered(workers: WorkerPools) -> None:
    for proof, is_row in workers(2).run(_prove_flat):
        assert proof.startswith("proved")
        assert is_row


def _recomputed() -> float:
    torch.manual_seed(0)
    mesh, block, inputs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), DropoutBlock(), torch.randn(SHAPE)
    apply_block(block, plan_block(block, (inputs,), {}, size=2, sequence_parallel=True), mesh)
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(1)
        leaf = inputs.detach().clone().requires_grad_()
        output = checkpoint(block, leaf, use_reentrant=False) if recompute else block(leaf)
        output.square().sum().backward()
        gradients.append(leaf.grad)
    return float((gradients[0] - gradients[1]).abs().max())


def test_recomputation_sees_the_same(workers: WorkerPools) -> None:
    assert workers(2).run(_recomputed) == [0.0, 0.0]


def _alive() -> list[int]:
    """Bytes that a forward leaves: planned without sequence parallel, with it, and the latter under a checkpoint."""
    torch.manual_seed(0)
    mesh, inputs, alive = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), torch.randn(SHAPE), []
    for along, recompute in ((False, False), (True, False), (True, True)):
        block = Block(32, 4)
        apply_block(block, plan_block(block, (inputs,), {}, size=2, sequence_parallel=along), mesh)
        leaf = inputs.detach().clone().requires_grad_()
        with LiveBytes() as live:
            output = checkpoint(block, leaf, use_reentrant=False) if recompute else block(leaf)
            gc.collect()
            alive.append(live.live - output.nbytes)
            output.sum().backward()
    return alive


def test_nothing_but_slices_is_alive_after_a_forward(workers: WorkerPools) -> None:
    activation = 4 * torch.Size(SHAPE).numel()
    for whole, slices, recomputed in workers(2).run(_alive):
        assert whole - slices >= activation  # of norms, residuals and the inputs of column weights half stays
        assert recomputed == 0


def test_input_that_can_not_be_cut_is_left_whole() -> None:
    block = Block(32, 4)
    plan = plan_block(block, (torch.randn(2, 7, 32),), {}, size=2, sequence_parallel=True)
    assert not plan.is_sequence_parallel
    assert plan.num_all_reduces_forward == plan.num_all_reduces_backward == 2


LAYOUTS = [
    Layout(tp=2, sequence_parallel=True),
    pytest.param(Layout(tp=4, sequence_parallel=True), marks=pytest.mark.matrix),
    Layout(pp=2, tp=2, num_microbatches=2, sequence_parallel=True),
    Layout(dp=2, tp=2, zero=3, sequence_parallel=True),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layout_equals_one_process(workers: WorkerPools, layout: Layout) -> None:
    job = Job(gradient_clip_val=0.3)
    result = run_layout(workers, job, layout)
    assert_parity(run_reference(job), result, tolerance=1e-5)
    blocks = [block.tensor for block in result.plan.blocks if block.kind == Block.__name__]
    assert len(blocks) == len(TinyGPT().blocks)
    assert all(plan is not None and plan.is_sequence_parallel for plan in blocks)


def _run_compiled(backend: str) -> dict[str, Any]:
    """Eager and compiled: output and gradients, collectives of forward and backward, bytes kept, warnings."""
    torch.manual_seed(0)
    mesh, dense, inputs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), DropoutBlock(), torch.randn(4, 64, 32)
    plan = plan_block(dense.eval(), (inputs,), {}, size=2, sequence_parallel=True)
    assert plan.is_sequence_parallel
    dense.train()
    found: dict[str, Any] = {}
    for name, compiler in (("eager", None), ("compiled", BlockCompiler(mesh, CompileConfig(backend=backend)))):
        block = copy.deepcopy(dense)
        apply_block(block, plan, mesh, compiler=compiler)
        block(inputs.clone().requires_grad_())  # is compiled now
        torch.manual_seed(2)
        leaf = inputs.clone().requires_grad_()
        with Collectives() as forward:
            output = block(leaf)
        with Collectives() as backward:
            output.sin().mean().backward()
        values = [output.detach(), leaf.grad, *(_local(parameter.grad) for parameter in block.parameters())]
        found[name] = values, by_kind(forward.sent), by_kind(backward.sent), _saved_bytes(block, leaf)
        found["num_compiled"] = compiler.num_compiled if compiler else 0
    return found


@pytest.mark.parametrize(
    ("backend", "more"),
    [
        ("aot_eager", 4 * 64 * 32 * 4),  # it keeps the block's input for the slice of it
        pytest.param(
            "inductor", 0, marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
        ),
    ],
)
def test_compiled_block_gathers_again_and_keeps_no_gathered_activation(
    workers: WorkerPools, backend: str, more: int
) -> None:
    for found in workers(2).run(_run_compiled, backend):
        values, forward, backward, kept = found["compiled"]
        assert found["num_compiled"] == 1
        for value, expected in zip(values, found["eager"][0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        assert (forward, backward) == found["eager"][1:3]
        assert backward["all-gather"] == 5
        assert kept <= found["eager"][3] + more
