"""User code between steps: calls and copies of modules of parts, and what one rank does alone.

What else users do there, the law's habits show.
"""

from __future__ import annotations

import copy
import re
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
from lightning_3d.ranks import standstill
from tests.models import ADAM_EPS, TinyGPT, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

DP, PP, TP, ZERO = Layout(dp=2), Layout(pp=2), Layout(tp=2), Layout(dp=2, zero=3)

INPUTS = torch.linspace(-1, 1, 32).view(4, 8)

Seen = dict[str, Tensor]
Habit = Callable[["Coders"], None]


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

    def __init__(self, habit: Habit | None = None) -> None:
        super().__init__()
        self.backbone, self.decoder, self.habit = Coder(8, 6), Coder(6, 4), habit
        self.seen: Seen = {}

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.backbone(x))  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.habit is not None:
            self.habit(self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=ADAM_EPS)


def _run(layout: Layout | None, habit: Habit | None, *callbacks: L.Callback) -> Seen:
    trainer, module = fitted(layout, partial(Coders, habit), callbacks=callbacks, data=features, batches=3)
    return {**whole_state(trainer), **cast(Coders, module).seen}


def _calls(module: Coders) -> None:
    strategy = module.trainer.strategy
    zero_stage = strategy.config.zero.stage if isinstance(strategy, ThreeDStrategy) else 0
    with torch.no_grad():
        module.seen["call"] = module(INPUTS)
    module.seen["forward"] = module.decoder.forward(torch.ones(2, 6)).detach()
    if zero_stage < 3:  # FSDP2 makes no copies that run
        module.seen["copy"] = copy.deepcopy(module)(INPUTS).detach()
    if not any(parameter.is_meta for parameter in module.parameters()):  # a stage lacks the others' values
        inputs = INPUTS.clone().requires_grad_()
        module(inputs).sum().backward()
        assert inputs.grad is not None
        module.seen["gradient"] = inputs.grad
        module.zero_grad()


class SamplesAfterValidation(L.Callback):
    """Calls the model where Lightning's inference mode is on, with dropout."""

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        module = cast(Coders, pl_module)
        torch.manual_seed(5)
        module.backbone.noise = 0.5
        module.seen["noisy"] = module(INPUTS).clone()
        module.backbone.noise = 0.0
        module.seen["drawn"] = torch.rand(2)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        cast(Coders, pl_module).seen["end"] = pl_module(INPUTS).detach()


def _call(layout: Layout | None) -> Seen:
    return _run(layout, _calls, SamplesAfterValidation())


@pytest.mark.parametrize("layout", [PP, TP, ZERO], ids=str)
def test_calls_are_those_of_one_process(workers: WorkerPools, layout: Layout) -> None:
    (expected,) = workers(1).run(_call, None)
    left_out = {"copy"} if layout.zero == 3 else {"gradient"} if layout.pp > 1 else set()
    assert_same_state(workers(2).run(_call, layout), {k: v for k, v in expected.items() if k not in left_out})


@torch.no_grad()
def _follows(module: Coders) -> None:
    """Changes weights by those of the other coder, which another pipeline stage may have, and reads all of them."""
    one, other = module.backbone.up, module.decoder.up
    other.bias.lerp_(one.bias, 0.5)
    module.decoder.scale.data.copy_(module.backbone.scale.data)
    torch._foreach_mul_([one.bias, module.backbone.scale], [other.bias, module.decoder.scale])
    other.bias.data = 0.9 * other.bias.data + 0.1 * one.bias.data
    module.seen["norm"] = torch.stack([parameter.norm() for parameter in module.parameters()]).norm()
    module.seen["vector"] = nn.utils.parameters_to_vector(module.parameters())


def _follow(layout: Layout | None) -> Seen:
    return _run(layout, _follows)


@pytest.mark.parametrize("layout", [Layout(pp=2, tp=2), Layout(pp=2, dp=2, zero=3)], ids=str)
def test_weights_follow_those_of_another_stage(workers: WorkerPools, layout: Layout) -> None:
    (expected,) = workers(1).run(_follow, None)
    assert_same_state(workers(layout.world_size).run(_follow, layout), expected)


def _refuse() -> None:
    def check(module: Coders) -> None:
        absent = [parameter for parameter in module.parameters() if parameter.is_meta]
        with pytest.raises(StepError, match="stack needs the values of"):
            torch.stack([parameter.norm() for parameter in module.parameters()])  # with a graph
        with pytest.raises(StepError, match="__float__ needs the values of"):
            float(absent[0].sum())
        with pytest.raises(StepError, match="A backward came to decoder, which was called outside of a step"):
            module(INPUTS).sum().backward()
        module.seen["checked"] = torch.ones(1)

    assert "checked" in _run(PP, check)


def test_a_stage_alone_is_told_what_it_lacks(workers: WorkerPools) -> None:
    workers(2).run(_refuse)


# ---- one rank alone


class Alone(L.Callback):
    """One rank samples, as in Lightning's example of an autoencoder, saves, summons, or clips."""

    def __init__(self, does: str = "samples") -> None:
        self.does = does

    @rank_zero_only
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.does == "clips":
            nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)

    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.does == "saves":
            trainer.save_checkpoint("alone.ckpt")
        with torch.no_grad():
            if self.does == "summons":
                with cast(ThreeDStrategy, trainer.strategy).summon_full_params():
                    pass
            module = cast(Coders, pl_module)
            module.seen["sampled"] = module.decoder(torch.ones(2, 6))


def _alone(layout: Layout | None, does: str = "samples") -> Seen:
    return _run(layout, None, Alone(does))


class Sampling(TinyGPT):
    """Rank 0 alone prints a sample, calls the model, or has a histogram of its weights, in a step or in a hook."""

    def __init__(self, place: str) -> None:
        super().__init__(vocabulary=64, num_layers=1)
        self.place = place

    def _look(self, place: str, *args: Tensor) -> None:
        if place == self.place and self.trainer.is_global_zero:
            self.sampled(*args)

    def sampled(self, logits: Tensor | None = None) -> list[int]:
        if logits is not None:
            return logits[0].argmax(-1).tolist()  # type: ignore[no-any-return]
        return [int(p.detach().cpu().histc(4)[0]) for p in self.parameters()]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        if batch_idx == 1:  # not seen by who plans
            self._look("training", logits)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self._look("validation", logits)
        self.log("val_loss", F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()), sync_dist=True)
        if self.place == "last call" and batch_idx == 1 and self.trainer.is_global_zero:
            self(batch[0])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._look("hook")


def _sample(layout: Layout, place: str) -> float:
    for name in ("_PATIENCE", "_CERTAIN", "_LONGEST"):
        setattr(standstill, name, 1.0)
    trainer, _ = fitted(layout, partial(Sampling, place), batches=2, epochs=1, gradient_clip_val=0.5)
    return float(trainer.callback_metrics["val_loss"])


def test_one_rank_may_read_logits_in_an_evaluation(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_sample, Layout(), "nowhere")
    assert workers(2).run(_sample, TP, "validation") == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "place", "message"),
    [
        (TP, "training", r"In a step, at test_between_steps.py:\d+, rank 0 came to a read of the logits of"),
        (ZERO, "hook", r"Between steps, at test_between_steps.py:\d+, rank 0 came to a use of"),
        (ZERO, "last call", r"All ranks wait for each other: rank 0 waits in \w+ at models.py:\d+; rank 1"),
    ],
    ids=str,
)
def test_a_rank_that_waits_with_all_others_for_each_other_ends(
    workers: WorkerPools, layout: Layout, place: str, message: str
) -> None:
    with pytest.raises(WorkerError, match=message):
        workers(2).run(_sample, layout, place, timeout=30, grace=5.0 if place == "last call" else 0.5)


@pytest.mark.parametrize(
    ("layout", "does", "message"),
    [
        (TP, "samples", "came to a call of decoder"),
        (DP, "saves", "came to a checkpoint"),
        (TP, "summons", "came to summon_full_params"),
        (ZERO, "clips", "came to .*gradient.*, which takes other ranks"),
    ],
    ids=str,
)
def test_a_rank_that_goes_alone_raises(workers: WorkerPools, layout: Layout, does: str, message: str) -> None:
    with pytest.raises(WorkerError) as raised:
        workers(2).run(_alone, layout, does, timeout=60, grace=1.0)  # the other one waits
    assert re.search(message, raised.value.failures[0])
