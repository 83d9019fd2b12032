"""Inline mode beside the law: how it is chosen and told of, and how its failures end."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import ConfigError, ThreeDStrategy
from lightning_3d.pipeline.inline.objects import changed_state, set_state, state_of
from tests.law import habits
from tests.law.models.inline import Carrying, Penalised, Reading
from tests.models import TinyMLP, features
from tests.parity import Layout, fitted, whole_state
from tests.workers import GRACE, WorkerError, WorkerPools


def _reason(model: Callable[[], L.LightningModule], mode: Any = "auto") -> str | None:
    settings: dict[str, Any] = {"batches": 1, "epochs": 1, "limit_val_batches": 0}
    trainer, _ = fitted(Layout(pp=2, mode=mode), model, data=features, **settings)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy.plan.inline


class Manual(habits.Manual, TinyMLP):
    """Steps by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.add_to()


class Scheduled(TinyMLP):
    """Steps its optimizer and its schedule by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()  # type: ignore[union-attr]
        schedule.step()  # type: ignore[union-attr, call-arg]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def _rate_and_weights(layout: Layout | None) -> tuple[float, dict[str, Tensor]]:
    trainer, _ = fitted(layout, Scheduled, data=features, epochs=1, limit_val_batches=0)
    return trainer.optimizers[0].param_groups[0]["lr"], whole_state(trainer)


def test_a_step_may_step_its_schedule_while_tensor_parallel_is_planned(workers: WorkerPools) -> None:
    rate, weights = _rate_and_weights(None)
    for found_rate, found in workers(2).run(_rate_and_weights, Layout(tp=2)):
        assert found_rate == rate == 0.1 * 0.5**4
        torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)


REASONS: dict[Callable[[], L.LightningModule], str | None] = {
    TinyMLP: None,
    Penalised: "grad (called at",
    Manual: "as it uses manual optimization",
    Reading: "needs the data of a tensor that comes from a block",
}


@pytest.mark.parametrize("model", REASONS)
def test_what_stages_can_not_follow_runs_inline_and_says_why(
    workers: WorkerPools, model: Callable[[], L.LightningModule]
) -> None:
    for reason in workers(2).run(_reason, model):
        wanted = REASONS[model]
        assert (reason is None) == (wanted is None)
        assert wanted is None or wanted in str(reason)


class _Fails(nn.Linear):
    """Fails in its forward or its backward."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__(32, 4)
        self.in_backward = in_backward

    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        if self.in_backward:
            output.register_hook(self._fail)
        else:
            self._fail(output)
        return output

    def _fail(self, tensor: Tensor) -> None:
        raise ArithmeticError("no more")


class Failing(TinyMLP):
    """Its last block fails."""

    def __init__(self, in_backward: bool) -> None:
        super().__init__()
        self.layers[-1] = _Fails(in_backward)  # type: ignore[index,operator]


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_block_that_fails_ends_all_ranks(workers: WorkerPools, in_backward: bool) -> None:
    with pytest.raises(WorkerError, match="ArithmeticError: no more") as failed:
        workers(2).run(_reason, partial(Failing, in_backward), "inline", grace=0.5 if in_backward else GRACE)
    assert failed.value.failures.keys() == {0, 1}
    assert in_backward or all("no more" in text for text in failed.value.failures.values())


class _InPlace(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class ChangesInputs(TinyMLP):
    """A block changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[-1] = _InPlace(32, 4)  # type: ignore[index,operator]


class Fetching(TinyMLP):
    """A step that fetches its batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Fetching, r".*Let it take the batch: def training_step\(self, batch, batch_idx"),
        (ChangesInputs, "layers.5 changed in place an argument that requires gradients"),
    ],
)
def test_what_inline_mode_can_not_do_is_refused(workers: WorkerPools, model: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=f"StepError: .*{message}"):
        workers(2).run(_reason, model, "inline", timeout=60)


class Alone(L.LightningModule):
    """Two players by manual optimization; rank 0 alone does something more in a step."""

    def __init__(self, habit: Callable[[Alone, Tensor], object]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.player, self.judge = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.habit = habit

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        played = self.player(batch[0])
        loss = self.judge(played).square().mean()
        if self.global_rank == 0:
            self.habit(self, batch[0])
        judged = self.judge(played.detach())
        self.manual_backward(loss + judged.mean())
        if self.global_rank == 0 and self.habit is _at_the_end:
            self.judge(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _at_the_end(module: Alone, x: Tensor) -> None:
    pass


def _calls(module: Alone, x: Tensor) -> object:
    return module.player(x)


def _calls_the_next(module: Alone, x: Tensor) -> object:
    return module.judge[0](x)


def _reads(module: Alone, x: Tensor) -> object:
    return module.judge[2].weight.norm()


def _differentiates(module: Alone, x: Tensor) -> object:
    return module.manual_backward(module.judge(x.clone().requires_grad_()).sum())


ALONE = {
    _calls: ("a call of player.0", "a call of judge.0"),
    _calls_the_next: ("a call of judge.0", "a call of judge.0"),  # each rank's line, where they parted
    _reads: ("a read of a weight of judge.2", "a call of judge.0"),
    _differentiates: ("a call of judge.0", "a call of judge.0"),
    _at_the_end: ("a call of judge.0", "the end of the step"),
}


@pytest.mark.parametrize("habit", ALONE)
def test_what_one_rank_does_alone_in_a_step_ends_all_in_a_line(workers: WorkerPools, habit: Any) -> None:
    with pytest.raises(WorkerError) as failed:
        workers(2).run(_reason, partial(Alone, habit), "inline", timeout=60)
    texts = failed.value.failures
    assert texts.keys() == {0, 1}
    here = rf" \(at \S+test_inline.py:\d+ in (training_step|{habit.__name__})\)"
    first, second = ALONE[habit]
    line = rf"StepError: .* rank 0 came to {first}({here})?, rank 1 came to {second}({here})?\. Each holds"
    for text in texts.values():
        found = re.search(line, text)
        assert found is not None, text
        assert found.group(1) != found.group(3)


@pytest.mark.parametrize(("key", "value"), [("num_microbatches", 4), ("schedule", "gpipe"), ("loss", "sum")])
def test_settings_of_microbatches_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"pipeline.{key}={value!r} .* pipeline.mode='inline'"):
        ThreeDStrategy(pipeline_parallel_size=2, pipeline={"mode": "inline", key: value})


def _evaluated(layout: Layout | None) -> float:
    trainer, module = fitted(layout, Carrying, data=features, batches=2)
    (results,) = trainer.validate(module, trainer.val_dataloaders, verbose=False)
    return float(results["val_loss"])


def test_validation_after_a_fit_gives_what_one_process_gives(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_evaluated, None)
    assert workers(2).run(_evaluated, Layout(pp=2, mode="inline")) == [expected] * 2


class Notes:
    """What layers share, and no pytree looks into."""

    def __init__(self) -> None:
        self.count = 0


def test_changes_of_objects_are_found_where_a_call_also_fills_a_dict() -> None:
    own, other = ((dict[str, Tensor](), Notes()) for _ in range(2))
    before = state_of(own, {})
    own[0]["keys"], own[1].count = torch.ones(1), 1
    set_state(other, {}, changed_state(before, state_of(own, {})))
    assert other[1].count == 1
