"""What is found out about a step from its code after the blocks alone, in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.model.blocks import find_blocks
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.loss_kind import LossKind
from lightning_3d.pipeline.loss_study import LossFound, LossStudy
from lightning_3d.pipeline.traces import Traces
from lightning_3d.trace.interception import routed
from lightning_3d.trace.tracer import StepTracing
from lightning_3d.zero.engine import RankModule
from tests.losses import CLASSES, LENGTH, LOSSES, WIDTH, LossNet, labelled

KINDS = {
    "mean": (LossKind.MEAN, False),
    "summed": (LossKind.SUM, False),
    "ignoring": (LossKind.WEIGHTED, True),
    "ignoring_one": (LossKind.WEIGHTED, True),
    "class_weighted": (LossKind.WEIGHTED, True),
    "selected": (LossKind.WEIGHTED, True),
    "picked": (LossKind.WEIGHTED, True),
    "divided": (LossKind.WEIGHTED, True),
    "smoothed": (LossKind.WEIGHTED, True),
    "contrastive": (LossKind.WHOLE, False),
    "sigmoid_contrastive": (LossKind.WHOLE, False),
    "ctc": (LossKind.SUM, False),
    "balanced": (LossKind.WHOLE, False),
    "of_several_tasks": (LossKind.WHOLE, False),
    "triplet": (LossKind.WHOLE, False),
}
"""Name of a loss -> its kind, and whether its weights show in what it is divided by."""


def _batch(num_samples: int) -> list[Tensor]:
    samples = [labelled(num_samples)[i] for i in range(num_samples)]
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def _found(model: L.LightningModule, batch: Any, name: str = "training_step", *, size: int = 4) -> LossFound:
    with routed(find_blocks(model, "parameters")) as router:
        model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
        device = torch.device("cpu")
        traces = Traces(model, router.blocks.values(), StepTracing(model, router, StepEffects(model, router), device))
        study = LossStudy(model, RankModule(model), router, traces, device)
        (call,) = traces.calls(name, [batch], (0,))
        return study.find(call, size=size, trains=name == "training_step")


@pytest.mark.parametrize("loss", LOSSES)
def test_kinds_of_losses(loss: str) -> None:
    torch.manual_seed(1)
    found = _found(LossNet(loss), _batch(8))
    assert found.failure is None
    kind, has_denominator = KINDS[loss]
    assert found.kind == kind
    if kind == LossKind.WEIGHTED:
        assert (found.denominator is not None) == has_denominator


def test_labels_that_are_all_valid_so_far_weigh_samples_all_the_same() -> None:
    features, labels = _batch(8)
    found = _found(LossNet("ignoring"), [features, labels.clamp(min=1)])
    assert (found.kind, found.denominator) == (LossKind.WEIGHTED, 0)


def test_parts_without_a_valid_label_fit_a_sum() -> None:
    features, labels = _batch(8)
    found = _found(LossNet("summed"), [features[:2], labels[:2].clamp(min=1)], size=1)
    assert found.kind == LossKind.SUM


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_how_values_are_joined(name: str) -> None:
    found = _found(LossNet("ignoring"), _batch(8), name)
    prefix = "" if name == "training_step" else "val_"
    joined = {value: how for value, how in found.averages.items() if "self.log" in value}
    if name == "training_step":
        assert joined[f"self.log('{prefix}loss', reduce_fx='mean')"] == "loss"
        assert joined[f"self.log('{prefix}accuracy', reduce_fx='mean')"] == "loss"
    else:  # whose loss has no gradients that tell its weights
        assert f"self.log('{prefix}loss', reduce_fx='mean')" in found.unjoined
    assert f"self.log('{prefix}squashed', reduce_fx='mean')" in found.unjoined


class Denoising(LossNet):
    """Predicts noise that it draws in the step."""

    def __init__(self, couples: bool = False) -> None:
        super().__init__("mean")
        self.couples = couples

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        noise = torch.randn(len(batch[0]), LENGTH, CLASSES)
        outputs = self(batch[0] + noise[..., :1])
        error = F.mse_loss(outputs["logits"], noise)
        return error + outputs["pooled"].std(0).mean() if self.couples else error


def test_noise_of_the_step_is_the_same_for_the_microbatches_and_the_batch() -> None:
    assert _found(Denoising(), _batch(8)).kind == LossKind.MEAN
    assert _found(Denoising(couples=True), _batch(8)).kind == LossKind.WHOLE


class HardestSample(LossNet):
    """Its weights depend on what the blocks give."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])["logits"].square().mean((1, 2)).max()


def test_a_loss_that_picks_samples_by_outputs_couples_them() -> None:
    assert _found(HardestSample("mean"), _batch(8)).kind == LossKind.WHOLE


class Thresholded(LossNet):
    """Logs what it makes of logits that are greater than a threshold, and trains on these alone."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits, wanted = self(batch[0])["logits"], batch[1][..., None] > 2
        found = logits.sigmoid() > 0.5
        self.log("iou", (found & wanted).sum() / (found | wanted).sum())
        return torch.where(logits > 0, logits, 0).sum() / (logits > 0).sum()


def test_outputs_on_both_sides_of_a_threshold() -> None:
    found = _found(Thresholded("mean"), _batch(8))
    assert found.kind == LossKind.WHOLE
    assert found.unjoined == ("self.log('iou', reduce_fx='mean')",)


class DropsPooled(LossNet):
    """Drops out what the blocks gave."""

    def __init__(self, loss: Callable[[Tensor], Tensor], *, inplace: bool = False) -> None:
        super().__init__("mean")
        self.of_pooled, self.inplace = loss, inplace

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.of_pooled(F.dropout(self(batch[0])["pooled"] * 2, 0.5, inplace=self.inplace).square())


@pytest.mark.parametrize("inplace", [False, True])
def test_losses_behind_dropout(inplace: bool) -> None:
    expected = {Tensor.mean: LossKind.MEAN, Tensor.sum: LossKind.SUM, Tensor.std: LossKind.WHOLE}
    for loss, kind in expected.items():
        found = _found(DropsPooled(loss, inplace=inplace), _batch(8))
        assert (found.kind, found.failure) == (kind, None)


class Flooded(LossNet):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return (super().training_step(batch, batch_idx) - 0.1).abs() + 0.1


def test_a_loss_that_is_bent_at_some_value_is_that_of_the_whole_batch() -> None:
    assert _found(Flooded("mean"), _batch(8)).kind == LossKind.WHOLE


def _of_sampled(probabilities: Tensor) -> Tensor:
    return probabilities.gather(1, torch.multinomial(probabilities, 1)).mean()


def test_randomness_after_the_blocks_is_told() -> None:
    found = _found(DropsPooled(_of_sampled), _batch(8))
    assert found.kind == LossKind.MEAN
    assert found.failure is not None
    assert "multinomial" in found.failure
    assert "draws random numbers after the blocks" in found.failure


class Normalised(LossNet):
    """Normalises its input by the batch."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, labels = batch
        return super().training_step((features - features.mean(0), labels), batch_idx)


def test_inputs_that_couple_samples_are_found() -> None:
    assert _found(Normalised("mean"), _batch(8)).coupled_inputs == ("first",)
    assert not _found(LossNet("mean"), _batch(8)).coupled_inputs
    assert not _found(Denoising(), _batch(8)).coupled_inputs


class Centred(LossNet):
    """Keeps a running mean, of what a block gives or of the batch, and takes it off what a block gives."""

    def __init__(self, where: str) -> None:
        super().__init__("mean")
        self.where = where
        self.register_buffer("center", torch.zeros(WIDTH))
        self.center: Tensor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features, x, routing = x, self.first(x), []
        for i, block in enumerate(self.blocks):
            if i == 1:
                x = self._centred(x, features)
            x, route = block(x)
            routing.append(route)
        logits = self.head(self.norm(x))
        logits = logits - self._moved(x).sum() if self.where == "after" else logits
        return {"logits": logits, "pooled": x.mean(1), "routing": torch.stack(routing)}

    def _moved(self, x: Tensor) -> Tensor:
        return self.center.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)

    def _centred(self, x: Tensor, features: Tensor) -> Tensor:
        if self.where == "kept":  # for other steps
            before = self.center.clone()
            self._moved(x)
            return x - before
        if self.where == "counted":
            self.center.add_(1.0)
            return x - self.center
        if self.where == "of the batch":
            self.center.copy_(features.mean().expand(WIDTH))
            return x - self.center
        return x - self._moved(x) if self.where == "between" else x


@pytest.mark.parametrize(
    ("where", "expected"),
    [("between", ("center",)), ("of the batch", ("center",)), ("kept", ()), ("counted", ()), ("after", ())],
)
def test_buffers_that_couple_samples_between_blocks_are_told_of(where: str, expected: tuple[str, ...]) -> None:
    found = _found(Centred(where), _batch(8))
    assert found.failure is None
    assert found.coupled_buffers == expected
    assert not found.coupled_inputs
