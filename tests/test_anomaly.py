"""`Trainer(detect_anomaly=True)`: all ranks raise one error that says where a value is not finite, and lose nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from torch import Tensor, nn

from lightning_3d import StepError, ThreeDPrecision
from tests.models import TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

LIMIT = 60.0
"""Seconds in which every rank has raised."""

STEPS_BEFORE = 2
"""Optimizer steps before the faulty one."""


class _NanBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


def _spoiled(x: Tensor, how: str) -> Tensor:
    if how == "backward":
        spoiled: Tensor = _NanBackward.apply(x)  # type: ignore[no-untyped-call]  # torch 2.13
        return spoiled
    return x + torch.full_like(x, float(how))


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that goes wrong in one call of one module on one rank."""

    how: Literal["nan", "inf", "backward"] = "nan"
    call: int = 0
    """Which call of it in the step, counted from 0: with a pipeline the microbatch."""
    rank: int | None = None
    """The only rank on which it does; None for all that run it."""


class Spoiling(nn.Module):
    """A module whose output can be spoiled."""

    def __init__(self, inner: nn.Module, fault: Fault) -> None:
        super().__init__()
        self.inner, self.fault = inner, fault
        self.calls: int | None = None
        """In this step; None while nothing goes wrong."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.inner(x)
        is_spoiled = self.calls == self.fault.call and self.fault.rank in (None, dist.get_rank())
        self.calls = None if self.calls is None else self.calls + 1
        return _spoiled(output, self.fault.how if is_spoiled else "0")  # glue has to make the same calls in each step


class FaultyGPT(TinyGPT):
    """A TinyGPT in which the third block, or glue between the second and third block, can go wrong."""

    def __init__(self, place: Literal["block", "glue"], fault: Fault) -> None:
        super().__init__()
        spoiling = Spoiling(self.blocks[2] if place == "block" else nn.Identity(), fault)
        if place == "block":
            self.blocks[2] = spoiling
        else:
            self.spoiling = spoiling
        self.place = place

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for index, block in enumerate(self.blocks):
            x = self.spoiling(x) if self.place == "glue" and index == 2 else x
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Arm(L.Callback):
    """Lets the fault happen in one batch."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        for module in pl_module.modules():
            if isinstance(module, Spoiling):
                module.calls = 0 if batch_idx == STEPS_BEFORE else None


def _message(layout: Layout, model: partial[FaultyGPT]) -> tuple[str, float, dict[str, Tensor]]:
    """What is raised on this rank, after how long, and the state that is saved then."""
    start, callbacks = time.monotonic(), [_Arm(), OnExceptionCheckpoint(".")]
    with pytest.raises(StepError) as raised:
        fitted(layout, model, callbacks=callbacks, epochs=1, detect_anomaly=True, enable_checkpointing=True)
    elapsed = time.monotonic() - start
    state = torch.load("on_exception.ckpt", weights_only=False)["state_dict"] if dist.get_rank() == 0 else {}
    return str(raised.value), elapsed, state


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault in a layout, and what the error begins with."""

    layout: Layout
    fault: Fault
    place: Literal["block", "glue"] = "block"
    error: str
    where: str


NAN = "block blocks.2 made nan out of finite values"
AFTER_INF = "block blocks.3 made nan out of inf"
BACKWARD = (
    "the backward of block blocks.2 made nan: Function '_NanBackwardBackward' returned nan values in its 0th output"
)
WHOLE = "pipeline stage 0 of 1, microbatch 0 of 1"

CASES = {
    "zbv": Case(
        layout=Layout(pp=2, num_microbatches=2, schedule="zbv", stages_per_rank=2),
        fault=Fault(how="backward", call=1),
        error=BACKWARD,
        where="pipeline stage 2 of 4, microbatch 1 of 2, rank 1",
    ),
    "one replica": Case(
        layout=Layout(dp=2, zero=1),
        fault=Fault(how="inf", rank=1),
        error=AFTER_INF,
        where=f"{WHOLE}, rank 1",
    ),
    "backward on one replica": Case(
        layout=Layout(dp=2, zero=3),
        fault=Fault(how="backward", rank=1),
        error=BACKWARD,
        where=f"{WHOLE}, rank 1",
    ),
    "glue": Case(
        layout=Layout(dp=2, zero=0),
        fault=Fault(),
        place="glue",
        error="block blocks.2 was given nan, made outside of blocks before it",
        where=f"{WHOLE}, rank 0",
    ),
    "inline": Case(
        layout=Layout(pp=2, mode="inline"),
        fault=Fault(),
        error=NAN,
        where="pipeline stage 1 of 2, microbatch 0 of 1, rank 1",
    ),
    "backward inline": Case(
        layout=Layout(pp=2, mode="inline"),
        fault=Fault(how="backward"),
        error=BACKWARD,
        where="pipeline stage 1 of 2, microbatch 0 of 1, rank 1",
    ),
    "tensor parallel": Case(
        layout=Layout(tp=2),
        fault=Fault(rank=1),
        error=NAN,
        where=f"{WHOLE}, rank 1",
    ),
}


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, Tensor]]:
    """One process just before the faulty step, by the place of the fault."""
    return {
        place: whole_state(
            fitted(None, partial(FaultyGPT, place, Fault()), max_steps=STEPS_BEFORE, limit_val_batches=0)[0]
        )
        for place in ("block", "glue")
    }


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise_alike(name: str, workers: WorkerPools, states: dict[str, dict[str, Tensor]]) -> None:
    case = CASES[name]
    ranks = workers(case.layout.world_size).run(_message, case.layout, partial(FaultyGPT, case.place, case.fault))
    message = ranks[0][0]
    assert message.startswith(f"{case.error}: {case.where}, counted from 0. Trainer(detect_anomaly=True)")
    assert ("in forward\n    return _spoiled(output" in message) == (case.fault.how == "backward"), message
    for other, elapsed, _ in ranks:
        assert other == message
        assert elapsed < LIMIT
    assert_same_state([ranks[0][2]], states[case.place])


def _scaled_state() -> dict[str, Tensor]:
    settings: dict[str, Any] = {"detect_anomaly": True, "plugins": [ThreeDPrecision("16-mixed")], "epochs": 1}
    model = partial(FaultyGPT, "block", Fault(how="backward"))
    return whole_state(fitted(Layout(pp=2, num_microbatches=2), model, callbacks=[_Arm()], **settings)[0])


class ChecksItself(FaultyGPT):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.isnan():
            raise ArithmeticError("the model's own error")
        return loss


def test_overflows_of_scaled_losses_are_left_to_the_scale(workers: WorkerPools) -> None:
    """The faulty step is skipped."""
    for state in workers(2).run(_scaled_state):
        assert all(value.isfinite().all() for value in state.values())


def _notes() -> list[str]:
    with pytest.raises(ArithmeticError, match="the model's own error") as raised:
        fitted(Layout(dp=2), partial(ChecksItself, "block", Fault()), callbacks=[_Arm()], detect_anomaly=True)
    return raised.value.__notes__


def test_errors_of_the_model_are_explained(workers: WorkerPools) -> None:
    for rank, notes in enumerate(workers(2).run(_notes)):
        assert len(notes) == 1
        assert notes[0].startswith(f"Before that, {NAN}: {WHOLE}, rank {rank}, counted from 0.")
