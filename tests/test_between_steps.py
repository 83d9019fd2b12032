"""User code between steps: parameters as wholes, calls, freezing, and what one rank does alone.

Each habit of Lightning's users is compared with one process, on the same script.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from lightning_3d import StepError, ThreeDStrategy
from tests.models import ADAM_EPS, features
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

DP, PP, TP, ZERO = Layout(dp=2), Layout(pp=2), Layout(tp=2), Layout(dp=2, zero=3)

INPUTS = torch.linspace(-1, 1, 32).view(4, 8)

Seen = dict[str, Any]
Habit = Callable[[L.LightningModule, Seen], None]


class Coder(nn.Module):
    """A block that tensor parallel shards, with a method of its own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(inputs, 16), nn.Linear(16, outputs)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.noise = 0.0

    def encode(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.encode(x)) * self.scale.exp()
        return F.dropout(y, self.noise) if self.noise else y


class Coders(L.LightningModule):
    """An encoder and a decoder, and a habit of its author's at the end of batches."""

    habit: Habit | None = None

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.decoder = Coder(8, 6), Coder(6, 4)
        self.seen: Seen = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.backbone(x))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.habit is not None:
            self.habit(self, self.seen)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-2, eps=ADAM_EPS)


def _with_habit(habit: Habit) -> Coders:
    model = Coders()
    vars(model)["habit"] = lambda module, seen: habit(module, seen)
    return model


def _run(layout: Layout | None, habit: Habit, callbacks: tuple[Callable[[], L.Callback], ...] = ()) -> Seen:
    trainer, module = fitted(
        layout, partial(_with_habit, habit), callbacks=[make() for make in callbacks], data=features, batches=3
    )
    return {**whole_state(trainer), **cast(Coders, module).seen}


def _assert_same(runs: list[list[Seen]], expected: list[Seen], names: list[str]) -> None:
    for run in runs:
        for name, found, wanted in zip(names, run, expected, strict=True):
            assert found.keys() == wanted.keys()
            for key, value in wanted.items():
                assert type(found[key]) in (type(value), nn.Parameter), f"{name}, {key}: {type(found[key])}"
                torch.testing.assert_close(
                    found[key], value, atol=1e-5, rtol=1e-4, msg=lambda m, at=f"{name}, {key}": f"{at}: {m}"
                )


def _call(module: L.LightningModule, seen: Seen) -> None:
    with torch.no_grad():
        seen["call"] = module(INPUTS)
    coder = cast(Coder, module.decoder)
    seen["forward"] = coder.forward(torch.ones(2, 6)).detach()


def _call_copy(module: L.LightningModule, seen: Seen) -> None:
    copied = copy.deepcopy(module)
    seen["copy"] = copied(INPUTS).detach()


def _run_backward(module: L.LightningModule, seen: Seen) -> None:
    with torch.enable_grad():
        inputs = INPUTS.clone().requires_grad_()
        module(inputs).sum().backward()
    assert inputs.grad is not None
    seen["gradient"] = inputs.grad
    module.zero_grad()


def _nothing(module: L.LightningModule, seen: Seen) -> None:
    pass


class SamplesAfterValidation(L.Callback):
    """Calls the model where Lightning's inference mode is on, with dropout."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        seen = cast(Coders, pl_module).seen
        torch.manual_seed(5)
        coder = cast(Coder, pl_module.backbone)
        coder.noise = 0.5
        seen["noisy"] = pl_module(INPUTS).clone()
        coder.noise = 0.0
        seen["drawn"] = torch.rand(2)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cast(Coders, pl_module).seen["end"] = pl_module(INPUTS).detach()


Case = tuple[Habit, tuple[Callable[[], L.Callback], ...]]
ON_PARTS: dict[str, Case] = {"call": (_call, ()), "samples": (_nothing, (SamplesAfterValidation,))}
"""What each pipeline stage does with what it holds; the law has more of that (`by-hand`)."""

ON_COPIES: dict[str, Case] = {"copy": (_call_copy, ())}
"""What needs a copy that runs, of which FSDP2 makes none."""

ON_WHOLES: dict[str, Case] = {"backward": (_run_backward, ())}
"""What needs values of all parameters."""


def _run_all(layout: Layout | None, names: list[str]) -> list[Seen]:
    return [_run(layout, *(ON_PARTS | ON_COPIES | ON_WHOLES)[name]) for name in names]


@pytest.fixture(scope="module")
def one_process(workers: WorkerPools) -> dict[str, Seen]:
    """What each habit gives in one process."""
    names = [*ON_PARTS, *ON_COPIES, *ON_WHOLES]
    return dict(zip(names, workers(1).run(_run_all, None, names)[0], strict=True))


@pytest.mark.parametrize("layout", [DP, PP, TP, ZERO], ids=str)
def test_habits_are_those_of_one_process(workers: WorkerPools, one_process: dict[str, Seen], layout: Layout) -> None:
    names = [*ON_PARTS, *(ON_COPIES if layout.zero < 3 else ()), *(ON_WHOLES if layout.pp == 1 else ())]
    found = workers(layout.world_size).run(_run_all, layout, names)
    _assert_same(found, [one_process[name] for name in names], names)


# ---- what a pipeline stage can't do alone


def _refuse() -> None:
    def check(module: L.LightningModule, seen: Seen) -> None:
        absent = [parameter for parameter in module.parameters() if parameter.is_meta]
        with pytest.raises(StepError, match="stack needs the values of"):
            torch.stack([parameter.detach().norm() for parameter in module.parameters()])
        with pytest.raises(StepError, match="__float__ needs the values of"):
            float(absent[0].sum())
        with pytest.raises(StepError, match="A backward came to decoder, which was called outside of a step"):
            module(INPUTS).sum().backward()
        seen["checked"] = True

    assert _run(PP, check)["checked"]


def test_a_stage_alone_is_told_what_it_lacks(workers: WorkerPools) -> None:
    workers(2).run(_refuse)


# ---- one rank alone


class Sampling(L.Callback):
    """As in Lightning's example of an autoencoder, or with a checkpoint of its own."""

    def __init__(self, does: str = "samples") -> None:
        self.does = does

    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = trainer.strategy
        if self.does == "saves":
            trainer.save_checkpoint("alone.ckpt")
        pl_module.eval()
        with torch.no_grad():
            if self.does == "summons" and isinstance(strategy, ThreeDStrategy):
                with strategy.summon_full_params():
                    pass
            cast(Coders, pl_module).seen["sampled"] = cast(Coder, pl_module.decoder)(torch.ones(2, 6))
        pl_module.train()


def _sample(layout: Layout | None, does: str = "samples") -> Seen:
    return _run(layout, _nothing, (partial(Sampling, does),))


def test_rank_zero_samples_alone_where_it_has_the_model(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_sample, None)
    first, second = workers(2).run(_sample, DP)
    _assert_same([[first]], [expected], ["sampling"])
    del expected["sampled"]
    _assert_same([[second]], [expected], ["sampling"])


@pytest.mark.parametrize(
    ("layout", "does", "message"),
    [
        (TP, "samples", "came to a call of decoder"),
        (DP, "saves", "came to a checkpoint"),
        pytest.param(ZERO, "samples", "came to a call of decoder", marks=pytest.mark.matrix),
        pytest.param(TP, "summons", "came to summon_full_params", marks=pytest.mark.matrix),
    ],
    ids=str,
)
def test_a_rank_that_goes_alone_raises(workers: WorkerPools, layout: Layout, does: str, message: str) -> None:
    with pytest.raises(WorkerError) as raised:
        workers(2).run(_sample, layout, does, timeout=60)
    assert message in raised.value.failures[0]


# ---- the module after fit


def _pickle(layout: Layout) -> None:
    trainer, module = fitted(layout, Coders, data=features)
    module.eval()
    with pytest.raises(StepError, match="can't be pickled, as this rank holds a part"):
        pickle.dumps(module)
    strategy = cast(ThreeDStrategy, trainer.strategy)
    with strategy.summon_full_params():
        expected, pickled = module(INPUTS), pickle.dumps(module)
    loaded = pickle.loads(pickled)
    loaded.load_state_dict(loaded.double().state_dict())
    torch.testing.assert_close(loaded.float()(INPUTS), expected)
    with pytest.raises(StepError, match="was exported, but the ranks hold parts of the model"):
        torch.jit.trace(module, INPUTS)  # type: ignore[no-untyped-call]
    with strategy.summon_full_params():
        traced = torch.jit.trace(module, INPUTS)(INPUTS)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(traced, expected)


@pytest.mark.parametrize("layout", [PP, ZERO], ids=str)
def test_a_module_of_parts_is_pickled_where_it_is_whole(workers: WorkerPools, layout: Layout) -> None:
    workers(2).run(_pickle, layout)
