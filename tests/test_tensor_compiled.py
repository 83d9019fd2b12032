"""Compiled sharded blocks: as dense ones, and eager with a reason where they must."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.compile import blocks
from lightning_3d.compile.blocks import BlockCompiler
from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.block_runner import running
from lightning_3d.tensor import BlockTensorPlan, apply_block, plan_block, verify_block
from lightning_3d.torch_internals.capture import NotCompilable
from lightning_3d.torch_internals.dynamo import modules_watched
from lightning_3d.waits import CountedWait
from tests.collectives import Collectives, planned
from tests.models import Block
from tests.workers import WorkerPools

SHAPE = (2, 8, 32)  # (B, T, D)


def _mesh(size: int = 2) -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))


class _Compiling:
    """A compiler, and how many forms it made."""

    def __init__(self) -> None:
        self._wait, self.mesh = CountedWait(), _mesh()
        self.compiler = BlockCompiler(
            CompileConfig(backend="aot_eager"), self.mesh, self._wait, is_telling=self.mesh.get_local_rank() == 0
        )

    @property
    def num(self) -> int:
        return self._wait.num

    def block(self, dense: nn.Module, plan: BlockTensorPlan | None = None) -> nn.Module:
        """A copy on shards, planned as a `Block`: a plan would not be found for all of them."""
        block = copy.deepcopy(dense)
        plan = plan or plan_block(Block(32, 4), (torch.empty(SHAPE),), {}, size=2)
        assert plan.is_sharded
        apply_block(block, plan, self.mesh)
        running(block).compiled = self.compiler.of(block)
        return block


@contextmanager
def _told() -> Iterator[list[str]]:
    """What is told of compiled blocks inside."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught, modules_watched():
        warnings.simplefilter("always")
        yield told
    told += [str(warning.message) for warning in caught if "compile.enabled" in str(warning.message)]


# ---------------------------------------------------------------------------------------------------- odd forwards


ODD: dict[str, tuple[Callable[..., Any], str | None]] = {
    "Looking": (lambda self, x: Block.forward(self, x if float(x[0, 0, 0]) else 2 * x), "data-dependent"),
    "Hooked": (lambda self, x: Block.forward(self, x), None),
    "Checkpointing": (
        lambda self, x: torch.utils.checkpoint.checkpoint(lambda x: Block.forward(self, x), x, use_reentrant=False),
        "it has a checkpoint",
    ),
}
"""Class of a block -> its forward, and why it is not compiled; None if it is."""


def _odd(name: str) -> Any:
    torch.manual_seed(0)
    block: Any = type(name, (Block,), {"forward": ODD[name][0]})(32, 4)
    if name == "Hooked":
        block.mlp.register_forward_hook(lambda module, args, output: output * 2.0)
    return block


def _odd_forwards(name: str) -> tuple[int, list[str]]:
    """How often a block was compiled, and what is told of calls, which give what those of the dense one do."""
    dense, inputs, compiling = _odd(name), torch.randn(SHAPE), _Compiling()
    block, outputs = compiling.block(dense), []
    with _told() as told:
        for each in (dense, block):
            outputs.append(torch.stack([each(inputs.clone()) for _ in range(3)]))
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
    return compiling.num, told


def _all_odd_forwards() -> dict[str, tuple[int, list[str]]]:
    return {name: _odd_forwards(name) for name in ODD}


def test_what_can_not_be_compiled_runs_eagerly_and_says_why(workers: WorkerPools) -> None:
    first, second = workers(2).run(_all_odd_forwards, timeout=300)
    for name, (_, reason) in ODD.items():
        num, told = first[name]
        assert second[name] == (num, [])
        if reason is None:
            assert (num, told) == (1, []), name
        else:
            assert num == 0
            assert f"compile.enabled: {name} runs eagerly" in told[0]
            assert reason in told[0], told


# ----------------------------------------------------------------------------------------------- all ranks, or none


def _refusing(*args: Any) -> Any:
    raise NotCompilable("not here")


def _refused_on_one() -> tuple[int, list[str], float]:
    torch.manual_seed(0)
    dense, inputs, compiling = Block(32, 4), torch.randn(SHAPE), _Compiling()
    block = compiling.block(dense)
    captures = blocks.capture if dist.get_rank() == 0 else _refusing
    with mock.patch.object(blocks, "capture", captures), _told() as told:
        difference = float((block(inputs) - dense(inputs)).detach().abs().max())
    return compiling.num, told, difference


def test_what_one_rank_can_not_compile_runs_eagerly_on_all(workers: WorkerPools) -> None:
    (_, told, first), (_, _, second) = workers(2).run(_refused_on_one)
    assert max(first, second) < 1e-5
    assert "another rank can't compile it" in told[0]


# -------------------------------------------------------------------------------------------------------- the proof


def _wrong(*args: Any) -> Any:
    computation = blocks.capture.right(*args)  # type: ignore[attr-defined]
    return lambda *tensors: [result * (1 + 1e-2) for result in computation(*tensors)]


def _proofs(is_sequence_parallel: bool) -> None:
    torch.manual_seed(0)
    dense, inputs, compiling = Block(32, 4), torch.randn(SHAPE, requires_grad=True), _Compiling()
    plan = plan_block(dense, (inputs,), {}, size=2, sequence_parallel=is_sequence_parallel)
    prove = lambda: verify_block(dense, plan, (inputs,), {}, compiling.mesh, compiled=compiling.compiler.of)  # noqa: E731
    assert prove().passed
    assert compiling.num == 1
    block = compiling.block(dense, plan)
    with Collectives() as forward:
        output = block(inputs)
    with Collectives() as backward:
        output.sum().backward()
    assert compiling.num == 1
    assert forward.sent == planned(plan, is_backward=False)
    assert backward.sent == planned(plan, is_backward=True)
    keeping = type("Keeping", (Block,), {"forward": lambda self, x: Block.forward(self, setattr(self, "last", x) or x)})
    kept: Any = compiling.block(keeping(32, 4), plan)
    kept(inputs)
    assert compiling.num == 2
    torch.testing.assert_close(kept.last * 1.0, inputs)
    right = blocks.capture
    with mock.patch.object(blocks, "capture", _wrong):
        blocks.capture.right = right  # type: ignore[attr-defined]
        compiling = _Compiling()
        assert not prove().passed


@pytest.mark.parametrize("is_sequence_parallel", [False, True])
def test_the_proof_is_of_what_is_compiled(workers: WorkerPools, is_sequence_parallel: bool) -> None:
    workers(2).run(_proofs, is_sequence_parallel)
