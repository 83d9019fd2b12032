"""Blocks compiled without tensor parallel, and beside it: the numbers of eager blocks, random ones as well."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_3d.activations.selective import is_costly
from lightning_3d.config.compile import CompileConfig
from lightning_3d.model.dense_compiler import DenseCompiler
from lightning_3d.torch_internals.dynamo import modules_watched
from lightning_3d.trace.interception import Router
from lightning_3d.waits import CountedWait, not_told
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
    layout: Layout, model: Callable[[], Any], settings: dict[str, Any] | None = None
) -> tuple[dict[str, Tensor], int, list[str]]:
    """The trained state, how many forwards of blocks ran eagerly, and warnings of the compiler."""
    EAGER.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fitted(layout, model, **(settings or {}))
    return whole_state(trainer), len(EAGER), [str(w.message) for w in caught if "compile.enabled" in str(w.message)]


LAYOUTS = [
    pytest.param(
        Layout(compile_backend="inductor", activations={"recompute": "selective"}),
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
    ),
    Layout(dp=2, zero=3, compile_backend="aot_eager", activations={"recompute": "full"}),
    Layout(
        pp=2, num_microbatches=4, schedule="zbv", compile_backend="aot_eager", activations={"recompute": "selective"}
    ),
]


def _name(layout: Layout) -> str:
    return "-".join([str(layout), str(layout.compile_backend), *map(str, layout.activations.values())])


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
def test_compiled_blocks_train_as_eager_ones(workers: WorkerPools, layout: Layout) -> None:
    run = partial(workers(layout.world_size).run, _trained)
    eager = run(replace(layout, compile_backend=None), DroppingGPT, {"accumulate_grad_batches": 2})
    compiled = run(layout, DroppingGPT, {"accumulate_grad_batches": 2})
    assert_same_state([state for state, _, _ in compiled], eager[0][0])
    assert all(num for _, num, _ in eager)
    assert [(num, told) for _, num, told in compiled] == [(0, [])] * layout.world_size


class Looking(Block):
    """Its control flow depends on data."""

    def __init__(self) -> None:
        super().__init__(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        _note_eager(x)
        return super().forward(x if x.sum() > 0 else -x)


class Counting(Block):
    """Counts its calls twice, has a BatchNorm and a hook, takes and gives more than tensors."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.batch_norm = nn.BatchNorm1d(32)
        self.register_buffer("num_calls", torch.zeros(()))
        self.calls = 0
        self.hooked = 0
        self.mlp.register_forward_hook(self._note_call)

    def _note_call(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        self.hooked += 1

    def forward(self, x: Tensor, *, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:  # type: ignore[override]
        _note_eager(x)
        self.calls += 1
        self.num_calls += 1
        x = super().forward(x)
        x = self.batch_norm(x.flatten(0, 1)).view_as(x) * state["scale"]
        return x, {"scale": state["scale"], "mean": x.mean()}


class CountingGPT(DroppingGPT):
    def __init__(self) -> None:
        super().__init__(Counting)

    def forward(self, tokens: Tensor) -> Tensor:
        x, state = self.tokens(tokens), {"scale": 0.5}
        for block in [*self.blocks, self.blocks[0]]:
            x, state = block(x, state=state)
        logits: Tensor = self.head(self.norm(x)) + state["mean"]
        return logits


COUNTS: list[Any] = []


class Told(CountingGPT):
    def on_train_end(self) -> None:
        COUNTS[:] = [(block.calls, block.hooked) for block in self.blocks]  # type: ignore[union-attr]


def _counts(layout: Layout) -> tuple[dict[str, Tensor], int, list[str], list[Any]]:
    return *_trained(layout, Told), list(COUNTS)


def test_what_blocks_change_comes_out_as_eagerly(workers: WorkerPools) -> None:
    ((expected, _, _, counts),) = workers(1).run(_counts, Layout())
    ((state, num_eager, told, found),) = workers(1).run(_counts, Layout(compile_backend="aot_eager"))
    assert_same_state([state], expected)
    assert (num_eager, told) == (0, [])
    assert found == counts
    assert counts[0][0] > counts[1][0] > 0, "the first block is called twice in each step"


@pytest.mark.parametrize("layout", [Layout(dp=2, compile_backend="aot_eager")], ids=str)
def test_what_can_not_be_compiled_runs_eagerly_and_says_why(workers: WorkerPools, layout: Layout) -> None:
    model = partial(DroppingGPT, Looking)
    eager = workers(2).run(_trained, replace(layout, compile_backend=None), model)
    found = workers(2).run(_trained, layout, model)
    assert_same_state([state for state, _, _ in found], eager[0][0])
    (_, num, (told,)), (_, _, others) = found
    assert num == eager[0][1]
    assert told.startswith("compile.enabled: Looking runs eagerly, at least in part: ")
    assert "Data-dependent" in told or "data-dependent" in told, told
    assert not others


def _shapes() -> tuple[list[Any], list[str], int]:
    """Differences from eager calls over many lengths; warnings; forms compiled."""
    torch.manual_seed(0)
    block, waits = Dropping(), CountedWait(not_told)
    compiler = DenseCompiler(CompileConfig(enabled=True, backend="aot_eager"), is_costly, waits)
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


def test_copies_run_eagerly() -> None:
    block = Dropping()
    EAGER.clear()
    compiler = DenseCompiler(CompileConfig(enabled=True, backend="aot_eager"), is_costly)
    with Router({"block": block}, compiled=compiler.of).installed(), modules_watched():
        block(torch.randn(2, 4, 32))
        assert not EAGER
        copied = copy.deepcopy(block)
        with torch.no_grad():
            copied.norm1.weight.zero_()
        x = torch.randn(2, 4, 32)
        torch.manual_seed(1)
        found = copied(x)
        torch.manual_seed(1)
        assert torch.equal(found, type(copied).forward(copied, x))
    assert not any("_orig_mod" in name for name in block.state_dict())
