"""Tracing a step and following it by stages, in one process: what is followed, and what is refused with which words."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.distributed.rng import random_states_kept
from lightning_3d.errors import TraceError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.model.snapshot import preserved
from lightning_3d.pipeline.stage_run import StageRun
from lightning_3d.planning.stage_flow import StageFlow, cut
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router, routed
from lightning_3d.trace.trace import Trace
from lightning_3d.trace.traced_numbers import Decisions
from lightning_3d.trace.tracer import trace_step

WIDTH = 4
CPU = torch.device("cpu")


class Layers(nn.Module):
    """Four linear blocks whose glue is given as a function of the module and its input."""

    def __init__(self, glue: Callable[[Any, Tensor], Any], block: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) if block is None else block() for _ in range(4))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.glue = glue
        self.kept: Any = None

    def forward(self, x: Tensor) -> Any:
        return self.glue(self, x)


class Traced:
    """A module traced with an input; layer i goes to stage i."""

    def __init__(self, module: Layers, x: Tensor) -> None:
        self.module, self.x = module, x
        self.blocks = find_blocks(module)
        kept = preserved(module, without_data=self.blocks.values())
        with routed(self.blocks) as router, random_states_kept(), kept:
            self.trace: Trace = trace_step(lambda: module(x), module, router, CPU, calls_all=True)

    def cut(self) -> StageFlow:
        return cut(self.trace, {fqn: (i,) for i, fqn in enumerate(self.blocks)}, len(self.blocks))

    def run(self) -> Any:
        """What the last stage returns, the stages run one after the other."""
        flow, sent = self.cut(), ()
        for stage, fqn in enumerate(self.blocks):
            router = Router(self.blocks, absent=self.blocks.keys() - {fqn})
            with router.installed():
                run = StageRun(router, flow, stage, sent, lambda call: nullcontext())
                sent = run.run(lambda: self.module(self.x))
        with Router(self.blocks).installed():  # a backward may compute blocks of all stages again, in this one process
            return sent


def _input() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))


def _chain(module: Any, x: Tensor) -> Any:
    for layer in module.layers:
        x = layer(x)
    return x


# ------------------------------------------------------------------------------------------------------------- blocks


class Two(nn.Module):
    """Changes two arguments in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        if y is not None:
            x.mul_(2)
            y.add_(1)
        output: Tensor = self.inner(x)
        return output


class Counting(nn.Module):
    """Counts its calls, and ends with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        output: Tensor = self.norm(self.linear(x))
        return output


class Opaque:
    """An object that holds a tensor."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Returns(nn.Module):
    """Wraps its output."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(WIDTH, WIDTH), wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.linear(x))


# ---------------------------------------------------------------------------------------------- glue between the blocks


def _view_before_a_change(module: Any, x: Tensor) -> Tensor:
    x = module.layers[0](x)
    first = x[:, :1]
    x += module.layers[1](x)
    return module.layers[3](module.layers[2](x)) + first  # type: ignore[no-any-return]


def _two_views(module: Any, x: Tensor) -> Tensor:
    x = module.layers[1](module.layers[0](x))
    return module.layers[3](module.layers[2](x, x[:, :1]))  # type: ignore[no-any-return]


def _rows_of_a_tensor(module: Any, x: Tensor) -> Tensor:
    rows = torch.zeros(4, *x.shape)
    for i, layer in enumerate(module.layers):
        x = layer(x)
        rows[i].copy_(x)
    return rows.sum(0)


def _reads_a_buffer(module: Any, x: Tensor) -> Tensor:
    return _chain(module, x) + module.layers[0].norm.running_mean  # type: ignore[no-any-return]


def _hides_an_argument(module: Any, x: Tensor) -> Tensor:
    return module.layers[1](Opaque(module.layers[0](x)))  # type: ignore[no-any-return]


def _reads_a_counter(module: Any, x: Tensor) -> Tensor:
    y = _chain(module, x)
    return y * (1 if module.layers[1].num_calls else 2)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Layers, str]] = {
    "view before a change": (
        Layers(_view_before_a_change),
        r"add \(called at .*shares memory with one that add_ \(called at .*stages",
    ),
    "two views": (Layers(_two_views, Two), r"layers.2 \(called at .*in place that shares memory with another one"),
    "rows of a tensor": (Layers(_rows_of_a_tensor), r"through a view \(at .*test_tracer.py:\d+"),
    "number of calls": (
        Layers(_reads_a_counter, Counting),
        "Counting.num_calls was read outside of the block layers.1",
    ),
    "buffer": (Layers(_reads_a_buffer, Counting), "reads the buffer layers.0.norm.running_mean"),
    "no pytree": (
        Layers(_chain, lambda: Returns(Opaque)),
        r"layers.0 \(called at .*returned a Opaque that holds tensors and is not a pytree",
    ),
    "hidden argument": (
        Layers(_hides_an_argument),
        r"layers.1 \(called at .*got a Opaque that holds tensors of blocks",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_can_not_share_is_refused(name: str) -> None:
    module, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        Traced(module, _input()).run()


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("tolist", lambda x: x.tolist()),
        ("numpy", lambda x: x.detach().numpy()),
        ("__getitem__", lambda x: x[x > 0]),
        ("__format__", lambda x: f"{x.sum():.3f}"),
    ],
)
def test_reading_data_between_blocks_names_call_and_place(name: str, use: Callable[[Tensor], Any]) -> None:
    def glue(module: Any, x: Tensor) -> Any:
        x = module.layers[0](x)
        use(x)
        return _chain(module, x)

    with pytest.raises(TraceError, match=rf"{name} at .*test_tracer.py:\d+ in .* before the call of layers.1") as error:
        Traced(Layers(glue), _input())
    assert "another rank" in str(error.value)


def test_shapes_that_changed_since_the_trace_are_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        return _chain(module, module.layers[0](x).repeat(1 if module.kept is None else module.kept, 1))

    traced = Traced(Layers(glue), _input())
    traced.module.kept = 2
    with pytest.raises(TraceError, match=r"it took another path .*: repeat returned a tensor of shape \(6, 4\)"):
        traced.run()


def test_tensor_kept_from_an_earlier_step_is_refused() -> None:
    def glue(module: Any, x: Tensor) -> Any:
        return _chain(module, x if module.kept is None else x + module.kept)

    traced, other = Traced(Layers(glue), _input()), Layers(glue)
    traced.module.kept = other.kept = Ghost(traced.trace.tensors[0])
    with pytest.raises(TraceError, match="add got a tensor that a block made in an earlier step"):
        traced.run()
    with pytest.raises(TraceError, match=r"add \(called at .*which the block did not return in this step"):
        Traced(other, _input())


def test_decisions_are_made_again() -> None:
    decisions = Decisions()
    with decisions.noted({"step": 7, "current_epoch": 1, "global_step": 7}) as numbers:
        step = numbers["step"]
        assert (step + 1) % 2 == 0
        assert not 3 - step > 0
        assert 2 * step * 0.5 == 7.0
        assert -step < abs(-step)
        assert [0, 1][bool(step // 100)] == 0
        assert L.LightningModule().global_step == 7
    assert decisions.outcomes({"step": 7, "global_step": 7}) == (True, False, True, False, True)
    assert decisions.outcomes({"step": 108, "global_step": 0}) == (False, False, True, True, False)
