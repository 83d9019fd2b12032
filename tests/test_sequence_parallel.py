"""Sequence-parallel regions: the numbers of one process, the planned collectives, and activations cut by the size."""

from __future__ import annotations

import copy
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from lightning_3d.config.compile import CompileConfig
from lightning_3d.tensor import BlockCompiler, apply_block, plan_block
from tests.collectives import Collectives, by_kind
from tests.models import Block
from tests.workers import WorkerPools


class DropoutBlock(Block):
    """Drops in the residuals, which are sequence-parallel."""

    def __init__(self) -> None:
        super().__init__(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm1(x)), 0.5, self.training)
        output: Tensor = x + F.dropout(self.mlp(self.norm2(x)), 0.5, self.training)
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


def test_input_that_can_not_be_cut_is_left_whole() -> None:
    block = Block(32, 4)
    plan = plan_block(block, (torch.randn(2, 7, 32),), {}, size=2, sequence_parallel=True)
    assert not plan.is_sequence_parallel
    assert plan.num_all_reduces_forward == plan.num_all_reduces_backward == 2


def _run_compiled(backend: str) -> dict[str, Any]:
    """Eager and compiled: output and gradients, collectives of forward and backward, bytes kept."""
    torch.manual_seed(0)
    mesh, dense, inputs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), DropoutBlock(), torch.randn(4, 64, 32)
    plan = plan_block(dense.eval(), (inputs,), {}, size=2, sequence_parallel=True)
    assert plan.is_sequence_parallel
    dense.train()
    found: dict[str, Any] = {"dense": _saved_bytes(dense, inputs.clone().requires_grad_())}
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_blocks_gather_again_and_keep_their_part_of_the_activations(workers: WorkerPools) -> None:
    for found in workers(2).run(_run_compiled, "inductor"):
        values, forward, backward, kept = found["compiled"]
        assert found["num_compiled"] == 1
        for value, expected in zip(values, found["eager"][0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
        assert (forward, backward) == found["eager"][1:3]
        # Two regions, each entered by an all-gather and left by a reduce-scatter, and the block's output.
        assert forward == {"all-gather": 3, "reduce-scatter": 2}
        # Two more all-gathers for what was not kept; all-reduces of norms' and row biases' gradients.
        assert backward == {"all-gather": 5, "reduce-scatter": 2, "all-reduce": 6}
        assert kept <= found["eager"][3] <= 0.53 * found["dense"]
