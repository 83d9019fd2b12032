"""Blocks compiled without tensor parallel, and beside it: the numbers of eager blocks, random ones as well."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.selective import is_costly
from lightning_3d.compile.blocks import BlockCompiler
from lightning_3d.config.compile import CompileConfig
from lightning_3d.torch_internals.backends import compile_graph
from lightning_3d.torch_internals.dispatch import IsKept
from lightning_3d.torch_internals.dynamo import compiled, modules_watched
from lightning_3d.trace.interception import Router
from lightning_3d.waits import CountedWait
from tests.models import Block, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

# Dynamo looks at `grad` of what it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

EAGER: list[int] = []
"""One entry for each forward of a block in training whose Python code ran on real tensors."""


def _note_eager(x: Tensor) -> None:
    if not torch.compiler.is_compiling() and torch.is_grad_enabled() and type(x) is Tensor:
        EAGER.append(1)


class Dropping(Block):
    """Draws random numbers in four places."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.mlp.append(nn.Dropout(0.2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        _note_eager(x)
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(self.dropout(x))) * torch.rand(())


class DroppingGPT(TinyGPT):
    def __init__(self, block: Callable[[], nn.Module] = Dropping) -> None:
        super().__init__(num_layers=4)
        self.blocks = nn.ModuleList(block() for _ in range(4))


def _trained(
    layout: Layout | None, model: Callable[[], Any], settings: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], int, list[str]]:
    """The trained state, how many forwards of blocks ran eagerly, and warnings of the compiler."""
    EAGER.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fitted(layout, model, **(settings or {}))
    return whole_state(trainer), len(EAGER), [str(w.message) for w in caught if "compile.enabled" in str(w.message)]


LAYOUTS = {
    "inductor": Layout(compile_backend="inductor", activations={"recompute": "selective"}),
    "zero3": Layout(dp=2, zero=3, compile_backend="aot_eager", activations={"recompute": "full"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiled_blocks_train_as_eager_ones(workers: WorkerPools, name: str) -> None:
    layout = LAYOUTS[name]
    if layout.compile_backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    run = partial(workers(layout.world_size).run, _trained, timeout=300)  # inductor takes its time
    eager = run(replace(layout, compile_backend=None), DroppingGPT, {"accumulate_grad_batches": 2})
    compiled = run(layout, DroppingGPT, {"accumulate_grad_batches": 2})
    assert_same_state([state for state, _, _ in compiled], eager[0][0])
    assert all(num for _, num, _ in eager)
    assert [(num, told) for _, num, told in compiled] == [(0, [])] * layout.world_size


def _shapes() -> tuple[list[Any], list[str], int]:
    """Differences from eager calls over many lengths; warnings; forms compiled."""
    torch.manual_seed(0)
    block, waits = Dropping(), CountedWait()
    compiler = BlockCompiler(CompileConfig(enabled=True, backend="aot_eager"), wait=waits)
    differences = []
    with (
        Router({"block": block}, compiled=compiler.of).installed(),
        warnings.catch_warnings(record=True) as caught,
        modules_watched(),
    ):
        warnings.simplefilter("always")
        for length in (4, 8, 6, 5, 9, 7, 11, 12, 13, 14, 15):
            x = torch.randn(2, length, 32)
            torch.manual_seed(1)
            found = block(x)
            torch.manual_seed(1)
            differences.append(float((found - type(block).forward(block, x)).abs().max()))
    return differences, [str(w.message) for w in caught if "compile.enabled" in str(w.message)], waits.num


def test_lengths_that_change_become_one_form() -> None:
    differences, told, num_forms = _shapes()
    assert max(differences) < 1e-5
    assert not told
    assert num_forms == 2


# ----------------------------------------------------------------------------------------------------- recomputation


def _kept(function: Callable[[Tensor], Tensor], weights: list[Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Bytes that a forward keeps beside weights, and the gradient of its input."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    return sum(size for at, size in kept.items() if at not in {weight.data_ptr() for weight in weights}), gradient


def test_compiled_code_keeps_what_selective_recomputation_does() -> None:
    """The input; queries, keys, values; attention, its logsumexp, its projection; the first result of the MLP."""
    torch.manual_seed(0)
    block, x = Block(32, 4), torch.randn(2, 16, 32, requires_grad=True)

    def compile_it(is_kept: IsKept | None = None) -> Callable[[Tensor], Tensor]:
        backend = partial(compile_graph, backend="aot_eager", mode="default", is_kept=is_kept)
        return compiled(block.forward, backend)

    _, gradient = _kept(block, list(block.parameters()), x)
    kept, found = _kept(compile_it(is_costly), list(block.parameters()), x)
    torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-5)
    assert x.nbytes < kept <= x.nbytes * (1 + 3 + 1 + 1 / 8 + 1 + 4)  # a logsumexp per head of 8 channels
    assert _kept(compile_it(), list(block.parameters()), x)[0] > 1.2 * kept
