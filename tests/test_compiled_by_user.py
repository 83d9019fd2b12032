"""Modules and functions that the user compiled before fit train in every layout, as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.models import TinyMLP, features
from tests.parity import (
    Job,
    Layout,
    assert_parity,
    assert_same_state,
    fitted,
    run_layout,
    whole_state,
)
from tests.workers import WorkerPools

# Dynamo looks at `grad` of what it compiles.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

_compile = partial(torch.compile, backend="eager")  # dynamo's part, without a compiler


@_compile
def _loss(predicted: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(predicted, targets) + 0.1 * predicted.square().mean()


class CompilesParts(TinyMLP):
    """Layers, some of them in place, its forward and its loss."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third, *others = self.layers
        self.layers = nn.Sequential(_compile(first), _compile(second), third, *others)

    def configure_model(self) -> None:
        self.layers[2].compile(backend="eager")

    @_compile
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = _loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss


class Activated(nn.Linear):
    """A block with code of its own, as Dynamo leaves torch's containers alone where they have hooks."""

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(super().forward(x))


class CompilesWholeBlocks(TinyMLP):
    """Blocks in one graph each, the first behind a layer whose output may be lazy."""

    def __init__(self) -> None:
        super().__init__()
        torch.compiler.reset()  # forms of other tests' code count for the limit, too
        first, *_, last = self.layers
        self.layers = nn.Sequential(first, *(Activated(32, 32) for _ in range(4)), last)
        for block in self.layers[1:-1]:
            block.compile(backend="eager", fullgraph=True)


class DoesNotLog(TinyMLP):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), Layout(pp=2), Layout(tp=2)], ids=str)
def test_compiled_code_trains_as_in_one_process(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=CompilesParts, data=features)
    assert_parity(job, run_layout(workers, job, layout))


@pytest.mark.parametrize("activations", [{}, {"recompute": "full"}], ids=str)
def test_blocks_compiled_in_one_graph_stay_so_at_stage_3(workers: WorkerPools, activations: dict[str, Any]) -> None:
    job = Job(model=CompilesWholeBlocks, data=features)
    assert_parity(job, run_layout(workers, job, Layout(dp=2, zero=3, activations=activations)))


def _compiled_whole() -> Any:
    return torch.compile(DoesNotLog(), backend="eager")


def _trained(layout: Layout | None, model: Callable[[], Any]) -> tuple[dict[str, Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer, _ = fitted(layout, model, data=features, limit_val_batches=0)
    return whole_state(trainer), [str(warning.message) for warning in caught if "compile" in str(warning.message)]


def test_a_module_compiled_as_a_whole_runs_eagerly(workers: WorkerPools) -> None:
    expected, _ = _trained(None, _compiled_whole)
    trained = workers(2).run(_trained, Layout(pp=2), _compiled_whole)
    assert_same_state([state for state, _ in trained], expected)
    (warned,) = [message for message in trained[0][1] if "as a whole" in message]
    assert warned.startswith("DoesNotLog was compiled as a whole by torch.compile, but its steps run eagerly.")
