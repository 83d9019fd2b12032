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
from lightning_3d.trace.step_tracing import StepTracing
from lightning_3d.zero.engine import RankModule
from tests.losses import CLASSES, LENGTH, LOSSES, LossNet, labelled


def _batch(num_samples: int) -> list[Tensor]:
    samples = [labelled(num_samples)[i] for i in range(num_samples)]
    return [torch.stack(column) for column in zip(*samples, strict=True)]


def _found(model: L.LightningModule, batch: Any) -> LossFound:
    with routed(find_blocks(model, "parameters")) as router:
        model.log = lambda *args, **kwargs: None  # type: ignore[method-assign]  # there is no Trainer
        device = torch.device("cpu")
        traces = Traces(model, router.blocks.values(), StepTracing(model, router, StepEffects(model, router), device))
        study = LossStudy(model, RankModule(model), router, traces, device)
        (call,) = traces.calls("training_step", [batch], (0,))
        return study.find(call, size=4)


class Using(LossNet):
    """Has a loss of all that its blocks gave and of its labels; its features may come from them and noise of a step."""

    def __init__(self, loss: Callable[[dict[str, Tensor], Tensor], Tensor], features: Any = lambda x: x) -> None:
        super().__init__("mean")
        self.of_outputs, self.features = loss, features

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.of_outputs(self(self.features(batch[0])), batch[1])


def _denoised(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return F.mse_loss(outputs["logits"], torch.randn(outputs["logits"].shape))


def _dropped(of: Callable[[Tensor], Tensor], *, inplace: bool) -> Callable[[dict[str, Tensor], Tensor], Tensor]:
    return lambda outputs, labels: of(F.dropout(outputs["pooled"] * 2, 0.5, inplace=inplace).square())


def _noisy(x: Tensor) -> Tensor:
    return x + torch.randn(len(x), LENGTH, CLASSES)[..., :1]


def _flooded(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    return (LOSSES["mean"](outputs, labels) - 0.1).abs() + 0.1


def _at_least_one(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    valid = labels > 0
    return (outputs["logits"].square().mean(-1) * valid).sum() / valid.sum().clamp(min=1)


KINDS: dict[str, tuple[LossNet, LossKind]] = {
    "summed": (LossNet("summed"), LossKind.SUM),
    "ignoring": (LossNet("ignoring"), LossKind.WEIGHTED),
    "smoothed": (LossNet("smoothed"), LossKind.WEIGHTED),
    "balanced": (LossNet("balanced"), LossKind.WHOLE),
    "noise of the step": (Using(_denoised, _noisy), LossKind.MEAN),
    "hardest sample": (Using(lambda o, y: o["logits"].square().mean((1, 2)).max()), LossKind.WHOLE),
    "bent at some value": (Using(_flooded), LossKind.WHOLE),
    **{
        f"{of.__name__} behind dropout, {inplace}": (Using(_dropped(of, inplace=inplace)), kind)
        for inplace in (False, True)
        for of, kind in ((Tensor.mean, LossKind.MEAN), (Tensor.sum, LossKind.SUM), (Tensor.std, LossKind.WHOLE))
    },
    "divided by one at least": (Using(_at_least_one), LossKind.WHOLE),
    "made of picked rows": (Using(LOSSES["selected"]), LossKind.WHOLE),
}


@pytest.mark.parametrize("name", KINDS)
def test_kinds_of_losses(name: str) -> None:
    """With all but the odd ones the law trains."""
    model, kind = KINDS[name]
    found = _found(model, _batch(8))
    assert (found.kind, found.failure) == (kind, None)
    assert bool(found.denominators) == (kind == LossKind.WEIGHTED)


def _of_sampled(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    probabilities = outputs["pooled"].square()
    return probabilities.gather(1, torch.multinomial(probabilities, 1)).mean()


def test_randomness_after_the_blocks_is_told() -> None:
    found = _found(Using(_of_sampled), _batch(8))
    assert found.kind == LossKind.WHOLE  # where nothing needs to stand in for it
    assert "multinomial" in str(found.failure)
    assert "draws random numbers after the blocks" in str(found.failure)
