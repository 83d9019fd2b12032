"""Compiled blocks: the numbers of dense ones, compiled as often as needed, and eager with a reason where they must."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from lightning_3d import ThreeDStrategy
from lightning_3d.errors import ConfigError
from lightning_3d.tensor import BlockCompiler, apply_block, compiled_call, plan_block, verify_block
from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.test_tensor_apply import _run
from tests.test_tensor_convolution import Basic
from tests.test_tensor_plan import Example, gpt, gpt2, llama, tokens
from tests.test_unread_outputs import Telling, TellingBlock
from tests.workers import WorkerPools

SHAPE = (2, 8, 32)  # (B, T, D)


def _mesh(size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


def _compiled(
    dense: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], compiler: BlockCompiler, mesh: DeviceMesh
) -> nn.Module:
    block = copy.deepcopy(dense)
    plan = plan_block(block, args, kwargs, size=mesh.size())
    assert plan.is_sharded
    apply_block(block, plan, mesh, compiler=compiler)
    return block


# -------------------------------------------------------------------------------------------------------- values


def _blocks(names: list[str]) -> dict[str, Example]:
    made: dict[str, Callable[[], Example]] = {
        "gpt": gpt,
        "llama": llama,
        "gpt2": gpt2,
        "convolution": lambda: (Basic(), (torch.randn(4, 16, 6, 6),), {}),
    }
    torch.manual_seed(0)
    return {name: made[name]() for name in names}


def _compare(names: list[str], backend: str) -> dict[str, tuple[int, dict[str, int], dict[str, int]]]:
    """Two steps in training, between which the weights change; name -> kinds of calls compiled, collectives."""
    warnings.simplefilter("error")
    found = {}
    for name, (dense, args, kwargs) in _blocks(names).items():
        for module in dense.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        compiler = BlockCompiler(_mesh(), backend)
        block = _compiled(dense, args, kwargs, compiler, _mesh())
        for _ in range(2):
            dense.zero_grad()
            block.zero_grad()
            expected_loss, expected, _, _ = _run(dense, (dense, args, kwargs))
            loss, gradients, forward, backward = _run(block, (block, args, kwargs))
            torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-4)
            assert gradients.keys() == expected.keys()
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-4, atol=1e-5)
            for (fqn, buffer), wanted in zip(block.named_buffers(), dense.buffers(), strict=True):
                torch.testing.assert_close(buffer, wanted, msg=lambda text, fqn=fqn: f"{fqn}: {text}")
            with torch.no_grad():
                for parameter in [*dense.parameters(), *block.parameters()]:
                    parameter.sub_(1e-2 * parameter.grad)
        found[name] = compiler.num_compiled, dict(forward), dict(backward)
    return found


@pytest.mark.parametrize(
    ("backend", "names"),
    [
        ("aot_eager", ["gpt", "llama", "gpt2", "convolution"]),
        pytest.param(
            "inductor",
            ["gpt"],
            marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
        ),
    ],
)
def test_values_and_gradients_are_those_of_the_dense_block(
    workers: WorkerPools, backend: str, names: list[str]
) -> None:
    pytest.importorskip("transformers")
    for found in workers(2).run(_compare, names, backend):
        for name, (num_compiled, forward, backward) in found.items():
            assert num_compiled == 1, name
            if name != "convolution":
                assert forward == backward == {"all_reduce": 2}, name


def _variants() -> dict[str, float]:
    """Ways to run a block -> greatest difference from the same way to run the dense one."""
    warnings.simplefilter("error")
    torch.manual_seed(0)
    dense, inputs, compiler = Block(32, 4), torch.randn(SHAPE), BlockCompiler(_mesh(), "aot_eager")
    block = _compiled(dense, (inputs,), {}, compiler, _mesh())
    ways: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
        "plain": lambda block, x: block(x),
        "no leaf": lambda block, x: block(x * 2),
        "recomputed": lambda block, x: checkpoint(block, x, use_reentrant=False),
        "twice": lambda block, x: block(block(x)),
        "without gradient": lambda block, x: torch.no_grad()(block)(x),
        "in inference mode": lambda block, x: torch.inference_mode()(block)(x.detach()).clone(),
    }
    differences = {}
    for name, way in ways.items():
        outputs, gradients = [], []
        for each in (dense, block):
            leaf = inputs.clone().requires_grad_()
            output = way(each, leaf)
            if output.requires_grad:
                output.sin().sum().backward()
                gradients.append(leaf.grad)
            outputs.append(output.detach())
        differences[name] = max(float((pair[0] - pair[1]).abs().max()) for pair in (outputs, gradients) if pair)
    with torch.autocast("cpu", torch.bfloat16):
        differences["autocast"] = float((block(inputs) - dense(inputs)).abs().max()) / 1e3
    differences["compiled"] = abs(compiler.num_compiled - 5)  # leaf or not is one kind
    return differences


def test_every_way_to_run_a_block_gives_its_values(workers: WorkerPools) -> None:
    for differences in workers(2).run(_variants):
        assert max(differences.values()) < 1e-5, differences
