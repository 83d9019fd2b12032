"""Compiled blocks: compiled as often as needed, and eager with a reason where they must."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.config.compile import CompileConfig
from lightning_3d.tensor import BlockCompiler, apply_block, plan_block
from lightning_3d.tensor.compiled import call as compiled_call
from tests.models import Block
from tests.workers import WorkerPools

AOT_EAGER = CompileConfig(backend="aot_eager")
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


# ------------------------------------------------------------------------------------------------------ fallbacks


class Cache:
    """Nothing that torch's pytrees know."""

    scale = 2.0


def _summed(x: Tensor) -> Tensor:
    total = x.detach().clone()
    dist.all_reduce(total)
    return x + total / dist.get_world_size()


def _seeding(self: Block, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return Block.forward(self, F.dropout(x, 0.5))


ODD: dict[str, tuple[Callable[..., Any], str]] = {
    "Looking": (lambda self, x: Block.forward(self, x if float(x[0, 0, 0]) else 2 * x), "reads the value of a tensor"),
    "Hiding": (lambda self, x: Block.forward(self, x * self.hidden[0]), "neither its arguments nor its modules hold"),
    "Leaving": (
        lambda self, x: Block.forward(self, setattr(self, "last", x.mean()) or x),
        "changes the attributes ['last']",
    ),
    "Counting": (
        lambda self, x: Block.forward(self, self.counts.append(0) or x),
        "changes the attributes ['counts']",
    ),
    "Overwriting": (lambda self, x: Block.forward(self, x.mul_(2.0)), "changes its arguments in place"),
    "Clipping": (
        lambda self, x: (self.norm1.weight.data.clamp_(0.0, 0.5), Block.forward(self, x))[1],
        "changes its parameters",
    ),
    "Communicating": (lambda self, x: Block.forward(self, _summed(x)), "communicates in place"),
    "Returning": (lambda self, x: {"x": Block.forward(self, x), "by": self}, "returns a Returning"),
    "Hooked": (lambda self, x: Block.forward(self, x), "Sequential inside of it has hooks"),
    "Taking": (
        lambda self, x, kept=None: Block.forward(self, x if kept is None else kept.append(x) or x),
        "changes a list or dict among its arguments",
    ),
    "Cached": (
        lambda self, x, cache=None: Block.forward(self, x if cache is None else x * cache.scale),
        "an argument is a Cache",
    ),
    "Sampling": (
        lambda self, x: Block.forward(self, x * torch.bernoulli(x.sigmoid())),
        "aten.bernoulli.default draws random numbers that depend on values of tensors",
    ),
    "Skipping": (lambda self, x: x if torch.rand(()) < 0.5 else Block.forward(self, x), "reads the value of a tensor"),
    "Playing": (
        lambda self, x: Block.forward(self, x * random.random() + np.random.rand()),
        "random numbers of Python or NumPy",
    ),
    "Seeding": (_seeding, "or seeds generators"),
    "OfItsOwn": (
        lambda self, x: Block.forward(self, x * torch.rand((), generator=torch.Generator().manual_seed(3))),
        "from a generator of its own",
    ),
}
"""Class of a block -> its forward, and why it is not compiled."""


def _odd(name: str) -> Any:
    torch.manual_seed(0)
    block: Any = type(name, (Block,), {"forward": ODD[name][0]})(32, 4)
    block.hidden, block.counts = [torch.full((32,), 2.0, requires_grad=True)], []
    if name == "Hooked":
        block.mlp.register_forward_hook(lambda module, args, output: output * 2.0)
    return block


def _fallbacks() -> dict[str, list[str]]:
    """Class of block -> what is told of calls, which give and leave behind what those of the dense block do."""
    found = {}
    for name in ODD:
        dense, inputs = _odd(name), torch.randn(SHAPE)
        compiler, block = BlockCompiler(_mesh(), AOT_EAGER), copy.deepcopy(dense)
        plan = plan_block(Block(32, 4), (inputs,), {}, size=2)  # it would not be found for all of them
        apply_block(block, plan, _mesh(), compiler=compiler)
        outputs, left = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each in (dense, block):
                kept: list[Tensor] = []
                more = {"Taking": (kept,), "Cached": (Cache(),)}.get(name, ())
                for seeded in (torch.manual_seed, random.seed, np.random.seed):
                    seeded(1)
                results = [each(inputs.clone(), *more) for _ in range(3)]
                outputs.append(torch.stack([one["x"] if isinstance(one, dict) else one for one in results]))
                left.append((len(kept), each.counts))
        assert (compiler.num_compiled, left[0]) == (0, left[1]), name
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)
        found[name] = [str(one.message) for one in caught if "compile.enabled" in str(one.message)]
    return found


def test_what_can_not_be_compiled_runs_eagerly_and_says_why(workers: WorkerPools) -> None:
    first, second = workers(2).run(_fallbacks)
    for name, (_, reason) in ODD.items():
        (told,) = first[name]
        assert f"compile.enabled: {name} runs eagerly" in told
        assert reason in told, told
    assert not any(second.values())


def _other_values() -> tuple[list[str], float]:
    """A compiler that errs."""
    torch.manual_seed(0)
    dense, inputs = Block(32, 4), torch.randn(SHAPE)
    compiler = BlockCompiler(_mesh(), AOT_EAGER)
    block = _compiled(dense, (inputs,), {}, compiler, _mesh())
    right = compiled_call.capture

    def wrong(*args: Any) -> Any:
        computation = right(*args)
        return lambda *tensors: [result * (1 + 1e-2 * dist.get_rank()) for result in computation(*tensors)]

    compiled_call.capture = wrong  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            difference = float((block(inputs) - dense(inputs)).abs().max())
    finally:
        compiled_call.capture = right  # type: ignore[attr-defined]
    return [str(warning.message) for warning in caught], difference


def test_what_computes_other_values_on_one_rank_is_used_on_none(workers: WorkerPools) -> None:
    for rank, (told, difference) in enumerate(workers(2).run(_other_values)):
        assert difference < 1e-5
        assert any("gave other values" in text for text in told) == (rank == 0)


# ------------------------------------------------------------------------------------------------- kinds of calls


class Scaled(Block):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(32, 4)
        self.scale = scale
        self.register_buffer("shift", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


def _recompiled() -> dict[str, Any]:
    torch.manual_seed(0)
    compiler, inputs = BlockCompiler(_mesh(), AOT_EAGER), torch.randn(SHAPE)
    dense = Scaled()
    block = _compiled(dense, (inputs,), {}, compiler, _mesh())
    alike = _compiled(dense, (inputs,), {}, compiler, _mesh())
    other = _compiled(Scaled(3.0), (inputs,), {}, compiler, _mesh())

    def differs(x: Tensor) -> float:
        return float((block(x) - dense(x)).detach().abs().max())

    found: dict[str, Any] = {"first": (differs(inputs), compiler.num_compiled)}
    found["again"] = (differs(inputs + 1.0), compiler.num_compiled)
    for each in (dense, block):
        each.shift.fill_(1.0)
    found["buffer"] = (differs(inputs), compiler.num_compiled)
    found["alike"] = (float((alike(inputs) + 1.0 - dense(inputs)).abs().max()), compiler.num_compiled)
    for each in (dense, block):
        each.scale = 2.0
    found["attribute"] = (differs(inputs), compiler.num_compiled)
    other(inputs)
    found["other"] = (0.0, compiler.num_compiled)
    for each in (dense, block):
        each.norm1.weight.requires_grad_(False)
    found["frozen"] = (differs(inputs), compiler.num_compiled)
    with warnings.catch_warnings(record=True) as caught, torch._dynamo.config.patch(recompile_limit=4):
        warnings.simplefilter("always")
        found["lengths"] = (max(differs(torch.randn(2, n, 32)) for n in (1, 2, 3, 1)), compiler.num_compiled)
    found["warnings"] = [str(warning.message) for warning in caught if "compile.enabled" in str(warning.message)]
    return found


def test_what_a_computation_depends_on_compiles_anew_up_to_a_limit(workers: WorkerPools) -> None:
    for rank, found in enumerate(workers(2).run(_recompiled)):
        told = found.pop("warnings")
        assert all(difference < 1e-5 for difference, _ in found.values()), found
        numbers = {name: number for name, (_, number) in found.items()}
        assert numbers.pop("lengths") == 5  # of the block itself 3 are known, and one is `other`'s
        assert numbers == {"first": 1, "again": 1, "buffer": 1, "alike": 1, "attribute": 2, "other": 3, "frozen": 4}
        assert len(told) == (rank == 0)
        assert rank or "more than 4 ways" in told[0]
