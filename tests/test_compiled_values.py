"""Values that a compiled block reads from elsewhere than its attributes: with others it computes something else."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.config.compile import CompileConfig
from lightning_3d.tensor import BlockCompiler, apply_block, plan_block
from tests.models import Block
from tests.workers import WorkerPools

SHAPE = (2, 8, 32)
SETTINGS = SimpleNamespace(inner=SimpleNamespace(factor=1.0))
scale = 1.0


def _helper() -> float:
    return scale


class Scaled(Block):
    """Scales its input by a value that it reads somewhere."""

    by = 1.0

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.array = np.array([1.0])

    def factor(self) -> float:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.factor())


class OfClass(Scaled):
    def factor(self) -> float:
        return self.by


class OfArray(Scaled):
    def factor(self) -> float:
        return float(self.array[0])


class OfGlobalObject(Scaled):
    def factor(self) -> float:
        return float(SETTINGS.inner.factor)


class OfHelper(Scaled):
    def factor(self) -> float:
        return _helper()


def _enclosed() -> tuple[type[Scaled], Callable[[float], None]]:
    value = 1.0

    class OfEnclosing(Scaled):
        def factor(self) -> float:
            return value

    def change(to: float) -> None:
        nonlocal value
        value = to

    return OfEnclosing, change


class OfOwner(Scaled):
    """Reads a module that it is no part of."""

    def factor(self) -> float:
        return float(self.owner[0].factor)


def _change(block: Scaled, to: float) -> None:
    global scale
    scale = OfClass.by = to
    block.array[0] = SETTINGS.inner.factor = to


def _outputs(
    make: type[Scaled], change: Callable[[Scaled, float], None], compiler: BlockCompiler | None
) -> tuple[list[Tensor], list[str]]:
    """What a block gives with one value, with another and with the first again; warnings."""
    torch.manual_seed(0)
    block, inputs = make(), torch.randn(SHAPE)
    owner = nn.Module()
    block.__dict__["owner"] = (owner,) if make is OfOwner else ()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    apply_block(block, plan_block(Block(32, 4), (inputs,), {}, size=2), mesh, compiler=compiler)
    found = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in (1.0, 2.0, 1.0):
            change(block, value)
            owner.factor = value
            found.append(block(inputs).detach())
    return found, [str(warning.message) for warning in caught if "compile.enabled" in str(warning.message)]


MAKES = (OfClass, OfArray, OfGlobalObject, OfHelper, OfOwner)


def _compared() -> None:
    mesh, (enclosing, change) = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), _enclosed()
    changes = {make: _change for make in MAKES} | {enclosing: lambda block, to: change(to)}
    for make, changing in changes.items():
        compiler = BlockCompiler(mesh, CompileConfig(backend="aot_eager"))
        (eager, _), (compiled, told) = (_outputs(make, changing, by) for by in (None, compiler))
        for wanted, found in zip(eager, compiled, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        assert (eager[0] - eager[1]).abs().max() > 0.1
        assert compiler.num_compiled == (0 if make is OfOwner else 2), make
        assert len(told) == (make is OfOwner and mesh.get_rank() == 0)
        assert all("it refers to a Module, whose attributes could change" in text for text in told)


def test_a_value_that_changes_is_compiled_anew(workers: WorkerPools) -> None:
    workers(2).run(_compared, timeout=300)
