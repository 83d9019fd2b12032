"""Tracing a step and following it by stages, in one process: what is refused, and numbers that decide."""

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
from lightning_3d.planning.stage_flow import cut
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
        self.glue = glue

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

    def run(self) -> Any:
        """What the last stage returns, the stages run one after the other."""
        flow, sent = cut(self.trace, {fqn: (i,) for i, fqn in enumerate(self.blocks)}, len(self.blocks)), ()
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


def _view_before_a_change(module: Any, x: Tensor) -> Tensor:
    x = module.layers[0](x)
    first = x[:, :1]
    x += module.layers[1](x)
    return module.layers[3](module.layers[2](x)) + first  # type: ignore[no-any-return]


def _reads_a_counter(module: Any, x: Tensor) -> Tensor:
    y = _chain(module, x)
    return y * (1 if module.layers[1].num_calls else 2)  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Layers, str]] = {
    "view before a change": (
        Layers(_view_before_a_change),
        r"add \(called at .*shares memory with one that add_ \(called at .*stages",
    ),
    "number of calls": (
        Layers(_reads_a_counter, Counting),
        "Counting.num_calls was read outside of the block layers.1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_stages_can_not_share_is_refused(name: str) -> None:
    module, message = REFUSED[name]
    with pytest.raises(TraceError, match=message):
        Traced(module, _input()).run()


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
