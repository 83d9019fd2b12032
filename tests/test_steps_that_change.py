"""Steps that come to do otherwise than those that were studied, by attributes and draws of which no trace tells."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from lightning_3d.pipeline.glue_seen import HandedOver, SeenGlue, UnseenError
from lightning_3d.pipeline.stage_run import plain_call
from tests.losses import LOSSES, LossNet, Outputs, labelled
from tests.models import TinyMLP, features
from tests.parity import (
    Job,
    Layout,
    Outcome,
    assert_parity,
    assert_same_state,
    fitted,
    run_layout,
    whole_state,
)
from tests.workers import WorkerPools


class Changing(LossNet):
    """Changes its features from the third step on, by a counter of its own."""

    def __init__(self, change: Callable[[Tensor], Tensor], replicas: int = 1) -> None:
        super().__init__("mean", replicas)
        self.change, self.seen = change, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return super().forward(self.change(x) if self.seen > 2 and self.training else x)


def _mixed(x: Tensor) -> Tensor:
    return 0.7 * x + 0.3 * x.flip(0)


def _mixed_by_chance(x: Tensor) -> Tensor:
    return x.lerp(x.roll(1, 0), random.random())


def _cut_and_pasted(x: Tensor) -> Tensor:
    start = np.random.randint(0, 4)
    x = x.clone()
    x[:, start : start + 2] = x.flip(0)[:, start : start + 2]
    return x


def _pasted_by_a_view(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, :2].copy_(x[torch.tensor(np.random.permutation(len(x)))][:, :2])
    return x


def _by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(0.5 * (x.numpy() + x.numpy()[::-1]))


COUPLING = {f.__name__.strip("_"): f for f in (_mixed, _mixed_by_chance, _cut_and_pasted, _pasted_by_a_view, _by_numpy)}


def _run(workers: WorkerPools, model: Callable[[], LossNet], layout: Layout, **settings: int) -> list[Outcome]:
    job = Job(model=model, data=labelled, **{"steps": 5, **settings})
    ranks = run_layout(workers, job, layout)
    assert_parity(Job(model=partial(model, replicas=layout.dp), data=labelled, **{"steps": 5, **settings}), ranks)
    return ranks


@pytest.mark.parametrize("change", COUPLING)
def test_samples_that_come_to_meet_before_the_blocks_are_those_of_the_batch(change: str, workers: WorkerPools) -> None:
    ranks = _run(workers, partial(Changing, COUPLING[change]), Layout(pp=2, num_microbatches=2, mode="auto"))
    assert ranks[0].plan is not None
    assert "couples samples" in str(ranks[0].plan.inline)


def test_replicas_whose_samples_come_to_meet(workers: WorkerPools) -> None:
    layout = Layout(pp=2, dp=2, num_microbatches=2, mode="auto", zero=2)
    ranks = _run(workers, partial(Changing, _mixed), layout)
    assert ranks[0].plan is not None
    assert "couples samples" in str(ranks[0].plan.inline)


def _augmented(x: Tensor) -> Tensor:
    return x + 0.1 * x.flip(2)


def _limited(x: Tensor) -> Tensor:
    return _augmented(x).clamp(max=2) if x.max() > 1.6 else _augmented(x)


STAYING = {
    "another augmentation": (_augmented, Layout(pp=2, num_microbatches=2), {"accumulate_grad_batches": 3, "steps": 2}),
    "one that the data choose": (
        _limited,
        Layout(pp=2, dp=2, num_microbatches=2, zero=3, zero_settings={"reshard_after_forward": True}),
        {},
    ),
}


@pytest.mark.parametrize("name", STAYING)
def test_steps_that_change_and_still_take_each_sample_by_itself_stay_in_microbatches(
    name: str, workers: WorkerPools
) -> None:
    change, layout, settings = STAYING[name]
    ranks = _run(workers, partial(Changing, change), layout, **settings)
    assert ranks[0].plan is not None
    assert ranks[0].plan.inline is None


class ChangingLoss(LossNet):
    """Has another loss from the third step on."""

    def __init__(self, early: str, late: Callable[[Outputs, Tensor], Tensor], replicas: int = 1) -> None:
        super().__init__(early, replicas)
        self.early, self.late, self.loss, self.seen = self.loss, late, self._loss, 0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def _loss(self, outputs: Outputs, labels: Tensor) -> Tensor:
        return (self.late if self.seen > 2 and self.training else self.early)(outputs, labels)


def _with_other_labels(outputs: Outputs, labels: Tensor) -> Tensor:
    return LOSSES["mean"](outputs, labels.flip(0))


def _averaged(outputs: Outputs, labels: Tensor) -> Tensor:
    return 0.1 * F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="mean")


@pytest.mark.parametrize(("early", "late"), [("mean", _with_other_labels), ("summed", _averaged)])
def test_losses_that_come_to_join_samples_otherwise(
    early: str, late: Callable[[Outputs, Tensor], Tensor], workers: WorkerPools
) -> None:
    ranks = _run(workers, partial(ChangingLoss, early, late), Layout(pp=2, num_microbatches=2))
    assert ranks[0].plan is not None
    assert any("couples samples" in text for text in ranks[0].plan.findings.losses)


class _Pairs(TinyMLP):
    """Compares neighbours, of which microbatches of four samples have pairs, and those of three do not."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        score = self(batch[0]).mean(1)
        return -F.logsigmoid(score[0::2] - score[1::2]).mean()


def _state_of_pairs(layout: Layout | None) -> dict[str, Tensor]:
    def data(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
        return features(num_samples - 2)  # the last batch is smaller

    return whole_state(fitted(layout, _Pairs, data=data, batches=3, epochs=1, limit_val_batches=0)[0])


def test_microbatches_of_another_size_may_join_otherwise(workers: WorkerPools) -> None:
    assert_same_state(workers(2).run(_state_of_pairs, Layout(pp=2, num_microbatches=2)), _state_of_pairs(None))


class _Noting(TorchFunctionMode):
    """Shows a run all that is computed."""

    def __init__(self, handed: HandedOver) -> None:
        super().__init__()
        self._handed = handed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handed.call(plain_call, func, args, kwargs or {})


def _logged(x: Tensor) -> Tensor:
    x.flip(0).mean()
    return x * 2


def _written(x: Tensor) -> Tensor:
    x = x * 1
    x[0].mul_(2)
    return x


Computing = Callable[[Tensor], Tensor]
STEPS: dict[str, tuple[Computing, Computing, bool]] = {
    "another number": (lambda x: x * 2 + 1, lambda x: x * 0.3 + 2.5, False),
    "another place": (lambda x: x[:, 1:3], lambda x: x[:, 0:2], False),
    "more often": (lambda x: torch.stack([x[0], x[1]]), lambda x: torch.stack([x[1], x[1], x[0]]), False),
    "logged": (lambda x: x * 2, _logged, False),
    "another function": (lambda x: x * 2, lambda x: x.flip(0) * 2, True),
    "another order": (lambda x: torch.cat([x[:2], x[2:]]).exp(), lambda x: torch.cat([x.exp()[:2], x[2:]]), True),
    "along the samples": (lambda x: x - x.mean(1, True), lambda x: x - x.mean(0, True), True),
    "another word": (lambda x: x.div(2), lambda x: x.div(2, rounding_mode="floor"), True),
    "written through a view": (lambda x: x * 1, _written, True),
    "read": (lambda x: x * 1, lambda x: torch.from_numpy(x.numpy()) * 1, True),
}


@pytest.mark.parametrize("name", STEPS)
def test_computations_that_count(name: str) -> None:
    glue, (first, second, is_other) = SeenGlue(), STEPS[name]

    def problem(step: Computing) -> UnseenError | None:
        handed = HandedOver(glue)
        x = torch.ones(4, 3)
        with _Noting(handed):
            x = step(x)
        handed.hand("block", [x])
        return handed.problem("training_step")

    assert problem(first) is None
    glue.is_studied = False
    assert problem(first) is None
    assert (problem(second) is not None) == is_other
