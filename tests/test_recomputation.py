"""Recomputed blocks: the same numbers, state and calls as without, in every layout; and that they are recomputed."""

from __future__ import annotations

import random
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from lightning_3d import ThreeDStrategy
from lightning_3d.activations.chosen_blocks import chosen_blocks
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.errors import ConfigError, PlanError, StepError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.precision.plugin import ThreeDPrecision
from tests.models import Regression, TinyGPT, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

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


# ---- settings


class Decaying(nn.Linear):
    """Changes its weight in each forward: shrinks or clamps it."""

    def __init__(self, is_clamping: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.is_clamping = is_clamping

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1) if self.is_clamping else self.weight.mul_(0.9)
        return super().forward(x)


class Smoothing(nn.Module):
    """Its model changes the large table that it reads."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.randn(2048, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.first(x) * self.table.mean(0)
        return output


class OneBlock(Regression):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(8, WIDTH), nn.ModuleList([block]), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks[0](self.stem(x)))
        return output


class SmoothingRegression(OneBlock):
    def __init__(self) -> None:
        super().__init__(Smoothing())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.blocks[0].table.mul_(0.9)  # type: ignore[union-attr,operator]
        return loss


class Swapping(OneBlock):
    """Has other weights in its block, or a hook there, for forwards alone."""

    def __init__(self, is_hooking: bool) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
        self.is_hooking, self.others = is_hooking, nn.ParameterList([torch.ones(WIDTH, WIDTH)])

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        linear: Any = self.blocks[0][0]  # type: ignore[index]
        if self.is_hooking:
            hook = linear.register_forward_hook(lambda module, args, output: output * 1.5)
            loss = super().training_step(batch, batch_idx)
            hook.remove()
            return loss
        own, linear.weight = linear.weight, self.others[0]
        loss = super().training_step(batch, batch_idx)
        linear.weight = own
        return loss


class DecayingRegression(OneBlock):
    def __init__(self, is_clamping: bool) -> None:
        super().__init__(nn.Sequential(nn.Tanh(), Decaying(is_clamping)))


def _trains(model: Any, mode: str, blocks: tuple[str, ...]) -> dict[str, Tensor]:
    trainer, _ = fitted(Layout(activations={"recompute": mode, "blocks": blocks}), model, data=features)
    return whole_state(trainer)


@pytest.mark.parametrize("mode", MODES)
def test_what_can_not_be_put_back_is_refused(workers: WorkerPools, mode: str) -> None:
    run, blocks = partial(workers(1).run, _trains), ("blocks.*",)
    clamping = partial(DecayingRegression, True)
    (plain,), (found,) = run(clamping, "none", ()), run(clamping, mode, blocks)
    for fqn, value in plain.items():
        torch.testing.assert_close(found[fqn], value, rtol=0, atol=1e-6)
    with pytest.raises(WorkerError, match=r"blocks\.0 changed a weight of its own of shape \(16, 16\) in place"):
        run(partial(DecayingRegression, False), mode, blocks)
    for model, message in (
        (SmoothingRegression, r"buffer of shape \(2048, 16\), which its forward left alone, was changed"),
        (partial(Swapping, False), "a parameter or module in it was replaced since its forward"),
        (partial(Swapping, True), "a hook that changed what its forward computed was removed since"),
    ):
        with pytest.raises(WorkerError, match=message):
            run(model, mode, blocks)


class Functional(OneBlock):
    """Calls all of it with other weights, which lead back to its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        weights = {name: weight * 0.8 for name, weight in self.named_parameters()}
        return F.mse_loss(functional_call(self, weights, (batch[0],)), batch[1])


class Vectorized(OneBlock):
    """Calls a block for one sample at a time."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(torch.vmap(self.blocks[0])(self.stem(x)))  # type: ignore[arg-type]
        return output


@pytest.mark.parametrize("model", [Functional, Vectorized])
def test_calls_by_transforms_and_with_other_weights_run_as_they_are(workers: WorkerPools, model: type) -> None:
    run = partial(workers(1).run, _trains, model)
    (plain,), (found,) = run("none", ()), run("full", ("blocks.*",))
    assert_same_state([found], plain)


def _refused(layout: Layout, model: type[Regression]) -> str:
    with pytest.raises(StepError) as raised:
        fitted(layout, model, data=features)
    return str(raised.value)


def test_calls_with_other_weights_are_refused_where_a_block_s_own_are_gathered(workers: WorkerPools) -> None:
    for error in workers(2).run(_refused, Layout(dp=2, zero=3), Functional):
        assert re.match(r"\w+\S* is a Tensor in place of a parameter in a call of ", error), error
        assert "zero.stage below 3" in error


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
