"""`Trainer(detect_anomaly=True)`: all ranks raise one error that says where a value is not finite, and lose nothing."""

from __future__ import annotations

import gc
import time
import weakref
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
from lightning_3d.pipeline.anomaly import Finding, Phase, StepWatch, Value, worst_value
from lightning_3d.trace.interception import routed
from lightning_3d.trainer.anomaly import RankFinding, describe
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
    """A TinyGPT in which the third block, the loss, or glue between the second and third block, can go wrong."""

    def __init__(self, place: Literal["block", "loss", "glue"], fault: Fault) -> None:
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

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return self.spoiling(loss) if self.place == "loss" else loss


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
    place: Literal["block", "loss", "glue"] = "block"
    error: str
    where: str
    then: str = ""


def _in_pipeline(schedule: Any, fault: Fault, error: str, then: str = "") -> Case:
    num_stages = 2 if schedule in ("gpipe", "1f1b") else 4
    layout = Layout(pp=2, num_microbatches=4, schedule=schedule, stages_per_rank=num_stages // 2)
    where = f"pipeline stage {num_stages // 2} of {num_stages}, microbatch {fault.call} of 4"
    return Case(layout=layout, fault=fault, error=error, where=where, then=then)


NAN = "block blocks.2 made nan out of finite values"
INF = "block blocks.2 made inf out of finite values"
THEN_NAN = " Then block blocks.3 gave nan."
LOSS = "made after the last block, head"
BACKWARD = (
    "the backward of block blocks.2 made nan: Function '_NanBackwardBackward' returned nan values in its 0th output"
)
WHOLE = "pipeline stage 0 of 1, microbatch 0 of 1"

CASES = {
    "1f1b": _in_pipeline("1f1b", Fault(how="backward", call=1), BACKWARD),
    "zbv": _in_pipeline("zbv", Fault(how="backward", call=3), BACKWARD),
    "one replica": Case(
        layout=Layout(dp=2, zero=1),
        fault=Fault(how="inf", rank=1),
        error=INF,
        where=f"{WHOLE}, data-parallel rank 1 of 2",
        then=THEN_NAN,
    ),
    "backward on one replica": Case(
        layout=Layout(dp=2, zero=3),
        fault=Fault(how="backward", rank=1),
        error=BACKWARD,
        where=f"{WHOLE}, data-parallel rank 1 of 2",
    ),
    "glue": Case(
        layout=Layout(dp=2, zero=0),
        fault=Fault(),
        place="glue",
        error="block blocks.2 was given nan, made outside of blocks before it, and gave nan",
        where=f"{WHOLE}, data-parallel rank 0 of 2",
    ),
    "one tensor-parallel rank": Case(
        layout=Layout(tp=2),
        fault=Fault(rank=1),
        error=NAN,
        where=f"{WHOLE}, tensor-parallel rank 1 of 2",
    ),
    "tensor parallel in a pipeline": Case(
        layout=Layout(pp=2, tp=2, num_microbatches=2),
        fault=Fault(call=1, rank=3),
        error=NAN,
        where="pipeline stage 1 of 2, microbatch 1 of 2, tensor-parallel rank 1 of 2",
    ),
}


@pytest.fixture(scope="module")
def states() -> dict[str, dict[str, Tensor]]:
    """One process just before the faulty step, by the place of the fault."""
    return {
        place: whole_state(
            fitted(None, partial(FaultyGPT, place, Fault()), max_steps=STEPS_BEFORE, limit_val_batches=0)[0]
        )
        for place in ("block", "loss", "glue")
    }


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise_alike(name: str, workers: WorkerPools, states: dict[str, dict[str, Tensor]]) -> None:
    case = CASES[name]
    ranks = workers(case.layout.world_size).run(_message, case.layout, partial(FaultyGPT, case.place, case.fault))
    message = ranks[0][0]
    assert message.startswith(f"{case.error}: {case.where}, counted from 0.{case.then} Trainer(detect_anomaly=True)")
    assert ("in forward\n    return _spoiled(output" in message) == (case.fault.how == "backward"), message
    for other, elapsed, _ in ranks:
        assert other == message
        assert elapsed < LIMIT
    assert_same_state([ranks[0][2]], states[case.place])


def _final_state(layout: Layout, model: Any, **trainer: Any) -> dict[str, Tensor]:
    return whole_state(fitted(layout, model, callbacks=[_Arm()], epochs=1, **trainer)[0])


class ChecksItself(FaultyGPT):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.isnan():
            raise ArithmeticError("the model's own error")
        return loss


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2, num_microbatches=2)], ids=str)
def test_overflows_of_scaled_losses_are_left_to_the_scale(layout: Layout, workers: WorkerPools) -> None:
    """The faulty step is skipped."""
    model = partial(FaultyGPT, "block", Fault(how="backward"))
    run = partial(_final_state, detect_anomaly=True, plugins=[ThreeDPrecision("16-mixed")])
    for state in workers(2).run(run, layout, model):
        assert all(value.isfinite().all() for value in state.values())


def _notes() -> list[str]:
    with pytest.raises(ArithmeticError, match="the model's own error") as raised:
        fitted(Layout(dp=2), partial(ChecksItself, "block", Fault()), callbacks=[_Arm()], detect_anomaly=True)
    return raised.value.__notes__


def test_errors_of_the_model_are_explained(workers: WorkerPools) -> None:
    for rank, notes in enumerate(workers(2).run(_notes)):
        assert len(notes) == 1
        assert notes[0].startswith(f"Before that, {NAN}: {WHOLE}, data-parallel rank {rank} of 2, counted from 0.")


def _finding(rank: tuple[int, int], phase: Phase, gave: Value, **further: Any) -> RankFinding:
    """A finding of (dp, tp) rank ``rank``."""
    settings: dict[str, Any] = {"stage": 0, "microbatch": 0, "order": 0, "block": "b", "after": None, **further}
    finding = Finding(num_microbatches=4, phase=phase, gave=gave, **{"took": Value.FINITE, **settings})
    return RankFinding(dp_rank=rank[0], tp_rank=rank[1], finding=finding)


def test_the_first_is_told() -> None:
    forward, backward, loss = Phase.FORWARD, Phase.BACKWARD, Phase.LOSS
    found = [
        _finding((0, 0), forward, Value.INFINITE, microbatch=0, block="a mask"),
        _finding((1, 1), forward, Value.NAN, microbatch=1, order=4, block="late"),
        _finding((1, 0), forward, Value.NAN, microbatch=1, order=4, block="late"),
        _finding((1, 0), forward, Value.INFINITE, microbatch=1, order=3, block="early"),
        _finding((0, 0), forward, Value.NAN, microbatch=2, block="later microbatch"),
        _finding((1, 0), backward, Value.NAN, microbatch=0, stage=0, order=-9, block="first stage"),
        _finding((1, 0), backward, Value.NAN, microbatch=0, stage=1, order=-5, block="last stage, earlier"),
        _finding(
            (1, 1),
            backward,
            Value.NAN,
            microbatch=0,
            stage=1,
            order=-7,
            block=None,
            after="last stage",
            detail="Function 'X'",
        ),
    ]
    where = "pipeline stage {} of 2, microbatch {} of 4, data-parallel rank 1 of 2"
    told = describe(found, 2, 2, 2)
    assert told.startswith(
        "the backward of code outside of blocks, after block last stage, made nan: Function 'X': "
        + where.format(1, 0)
        + ", tensor-parallel rank 1 of 2, counted from 0. Trainer"
    )
    told = describe(found[:5], 2, 2, 2)
    expected = f"block early made inf out of finite values: {where.format(0, 1)}, tensor-parallel rank 0 of 2"
    assert told.startswith(f"{expected}, counted from 0. Then block late gave nan. Trainer")
    inner = _finding((0, 0), forward, Value.NAN, order=1, block=None, detail="Function 'X'")
    told = describe([*found[:1], inner], 2, 2, 2)
    assert " Then the backward of code outside of blocks made nan: Function 'X'. Trainer" in told
    told = describe([*found[:1], _finding((0, 0), loss, Value.INFINITE, after="head")], 1, 1, 1)
    assert "block a mask made inf out of finite values: pipeline stage 0 of 1, microbatch 0 of 4, counted" in told
    assert "Then the loss was inf." in told
    told = describe([*found[:1], _finding((0, 0), backward, Value.NAN, detail="Function 'X'")], 1, 1, 1)
    assert "the backward of block b made nan" in told
    assert "In its forward before, block a mask made inf out of finite values." in told


class _Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: object) -> Tensor:
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_a_watched_graph_ends_with_its_outputs() -> None:
    held = Fault()
    is_held = weakref.ref(held)
    with routed({}) as router, StepWatch(router).microbatch(0, 0, 1) as watch:
        output = _Holds.apply(torch.ones(2, requires_grad=True), held)  # type: ignore[no-untyped-call]  # torch 2.13
    watch.see_backward([output])
    del held
    assert is_held() is not None
    gc.disable()  # it would hide a cycle, which would keep the memory of a step
    try:
        del output
        assert is_held() is None
    finally:
        gc.enable()


def test_kinds_of_values() -> None:
    assert worst_value([torch.ones(2), "text", None, torch.tensor([1]), torch.empty(0)]) == Value.FINITE
    assert worst_value([torch.tensor([1, -torch.inf]).bfloat16()]) == Value.INFINITE
    assert worst_value([torch.tensor([torch.inf]), torch.tensor([1, torch.nan])]) == Value.NAN
    assert worst_value([torch.tensor([complex(0, torch.nan)])]) == Value.NAN
    assert worst_value([torch.tensor([torch.nan, 0]).to_sparse()]) == Value.NAN
    assert worst_value([torch.tensor([torch.nan]).to(torch.float8_e5m2)]) == Value.NAN
    assert worst_value([torch.empty(2, device="meta")]) == Value.FINITE
    nested = torch.nested.nested_tensor([torch.ones(1), torch.tensor([torch.inf, 0])], layout=torch.jagged)
    assert worst_value([nested]) == Value.INFINITE
    seen: list[Value] = []
    torch.vmap(lambda x: seen.append(worst_value([x])) or x)(torch.tensor([0, torch.nan]))  # type: ignore[func-returns-value]
    assert seen == [Value.NAN]
