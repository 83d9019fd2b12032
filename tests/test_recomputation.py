"""Recomputed blocks: the same numbers, state and calls as without, in every layout; and that they are recomputed."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import ConfigError, PlanError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.precision.plugin import ThreeDPrecision
from tests.models import Regression, TinyGPT, features
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

WIDTH = 16
MODES = ("full", "selective")
FORWARDS: Counter[str] = Counter()
"""Forwards that the blocks of this process ran with gradients, recomputations included."""


class Busy(nn.Module):
    """Does all that a block may do besides computing; (B, WIDTH) -> its output and a dict with another.

    Args:
        has_generators: Whether it draws by random generators of its own, too, with which a pipeline runs inline.
    """

    def __init__(self, name: str, *, has_generators: bool) -> None:
        super().__init__()
        self.name = name
        self.inner, self.outer = nn.Linear(8 if name == "0" else WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm, self.dropout = nn.BatchNorm1d(4 * WIDTH), nn.Dropout(0.2)
        self.calls, self.means = 0, [0.0]
        self.own = torch.Generator().manual_seed(3) if has_generators else None
        self.of_numpy = np.random.default_rng(4) if has_generators else None
        self.register_buffer("average", torch.zeros(WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor, *, scale: float = 1.0, notes: list[Tensor] | None = None) -> dict[str, Any]:
        if self.training and torch.is_grad_enabled():
            FORWARDS[self.name] += 1
        hidden = F.relu(self.inner(x), inplace=True)  # changes the result of a matrix product in place
        hidden = self.dropout(self.norm(hidden)) * (1.0 + random.random() + (self.of_numpy or np.random).random())
        hidden = hidden + 0.1 * torch.rand((), generator=self.own)
        self.calls += 1
        self.means[0] = float(self.calls)
        output = self.outer(hidden) * (scale + 0.1 * (self.calls % 3))
        output += self.average.detach().clone()
        if self.training:
            self.average.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        if notes is not None:
            notes.append(output.mean())
        return {"output": output, "rest": (torch.tanh(output), None)}


class BusyNet(Regression):
    """Blocks with all of it, hooked."""

    lr = 0.01

    def __init__(self, *, has_generators: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Busy(str(i), has_generators=has_generators) for i in range(4))
        self.head = nn.Linear(WIDTH, 4)
        for block in self.blocks:
            block.norm.register_forward_hook(self._saw)  # type: ignore[union-attr,operator]
            block.outer.register_forward_pre_hook(self._will_see)  # type: ignore[union-attr,operator]
            block.outer.register_forward_hook(lambda module, args, output: output * 1.5)  # type: ignore[union-attr,operator]

    def _saw(self, module: nn.Module, args: Any, output: Tensor) -> None:
        HOOKED["forward"] += self.training and torch.is_grad_enabled()

    def _will_see(self, module: nn.Module, args: Any) -> None:
        HOOKED["before"] += self.training and torch.is_grad_enabled()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            notes: list[Tensor] = []
            given = block(x, scale=0.5 + 0.1 * i, notes=notes)
            x = given["output"] + 0.1 * given["rest"][0] + 0.01 * notes[0]
        output: Tensor = self.head(x)
        return output


HOOKED: Counter[str] = Counter()
"""Calls of the hooks in this process."""


def _outcome(
    layout: Layout, precision: Any
) -> tuple[dict[str, float], dict[str, Tensor], list[Any], Counter[str], Counter[str]]:
    """Metrics, state, attributes of the blocks here, calls of hooks, forwards."""
    FORWARDS.clear(), HOOKED.clear()
    made = partial(BusyNet, has_generators=layout.schedule != "zbv")
    trainer, module = fitted(layout, made, data=features, batches=2, plugins=[ThreeDPrecision(precision)])
    assert isinstance(module, BusyNet)
    assert HOOKED["forward"]
    here = [b for b in module.blocks if not next(b.parameters()).is_meta]
    attributes = [(block.calls, block.means) for block in here]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    forwards = Counter({block.name: FORWARDS[block.name] for block in here})
    return metrics, whole_state(trainer), attributes, HOOKED.copy(), forwards


def _outcomes(layout: Layout, precision: Any) -> list[Any]:
    return [_outcome(replace(layout, activations={"recompute": mode}), precision) for mode in ("none", *MODES)]


BUSY = {
    "dp2-zero3": (Layout(dp=2, zero=3), "16-mixed"),
    "pp2-zbv": (
        Layout(pp=2, num_microbatches=4, schedule="zbv", stages_per_rank=2, partition="type:Busy"),
        "bf16-mixed",
    ),
}


@pytest.mark.parametrize("name", BUSY)
def test_a_block_does_to_the_world_what_it_does_without_recomputation(workers: WorkerPools, name: str) -> None:
    layout, precision = BUSY[name]
    for plain, *recomputed in workers(layout.world_size).run(_outcomes, layout, precision):
        for metrics, state, attributes, hooked, forwards in recomputed:
            assert metrics == plain[0]
            for fqn, value in plain[1].items():
                torch.testing.assert_close(state[fqn], value, rtol=0, atol=0, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
            assert attributes == plain[2]
            assert hooked == plain[3]
            assert plain[4]
            times = 3 if layout.schedule == "zbv" else 2
            assert all(plain[4][name] < forwards[name] <= times * n for name, n in plain[4].items()), (
                forwards,
                plain[4],
            )


class InPlace(nn.Module):
    """Changes what products give in place, through a view of one; (B, T, WIDTH) -> (B, T, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.inner(x), inplace=True)
        return (hidden @ self.weight).mul_(2).sin()


def test_results_that_are_changed_in_place_serve_two_backwards() -> None:
    block, x = InPlace(), torch.randn(2, 3, WIDTH, requires_grad=True)
    recomputed = Recomputation("block", block, "selective", Generators(torch.device("cpu")))
    inputs = [x, *block.parameters()]
    expected = torch.autograd.grad(block(x).sum(), inputs)
    output = recomputed(block, (x,), {}).mul_(1.0).sum()
    for retain_graph in (True, False):
        found = torch.autograd.grad(output, inputs, retain_graph=retain_graph)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 2}, r"activations.recompute='none'.*'full' or 'selective'"),
        ({"recompute": "full", "blocks": "layers.*"}, r"activations.blocks='layers.*' is not allowed"),
        ({"partition": True}, r"activations.partition=True cuts.*'none'"),
        ({"recompute": "full", "partition": True}, r"activations.partition=True lets.*tensor_parallel_size=1"),
        ({"recompute": "full", "blocks": "type:("}, "no regular expression"),
        ({"recompute": "some"}, r"activations\.recompute='some'"),
    ],
)
def test_settings_that_say_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ThreeDStrategy(activations=settings)


def test_patterns_that_match_nothing_are_refused() -> None:
    blocks = find_blocks(TinyGPT())
    with pytest.raises(PlanError, match=r"'layers\.\*', which matches no block. The nearest block is 'blocks"):
        chosen_blocks(blocks, ActivationsConfig(recompute="full", blocks=("layers.*",)))
    with pytest.raises(PlanError, match=r"matches the class of no block\. Their classes: Block, Embedding"):
        chosen_blocks(blocks, ActivationsConfig(recompute="full", blocks="type:Layer$"))
