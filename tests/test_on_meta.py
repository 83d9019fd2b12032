"""Models that are built on the meta device, and get their values from a checkpoint alone."""

from __future__ import annotations

import re
from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d.errors import CheckpointError, PlanError, ThreeDError
from tests.models import TinyMLP, features, loader
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

trained = partial(fitted, data=features)


class Scales(nn.Module):
    """Multiplies by a buffer."""

    scale: Tensor

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((4,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Scaled(TinyMLP):
    """Has a buffer of a block, and one that the code outside of blocks reads."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(Scales(3.0))
        self.register_buffer("scale", torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) * self.scale
        return y


def on_meta(model: type[L.LightningModule]) -> L.LightningModule:
    with torch.device("meta"):
        return model()


def _resumed(layout: Layout) -> tuple[dict[str, Tensor], float, float]:
    """The weights after a second epoch of a model on meta, and the losses of both models in evaluation."""
    first, _ = trained(layout, Scaled, epochs=1)
    first.save_checkpoint("first.ckpt")
    again, module = trained(layout, partial(on_meta, Scaled), epochs=2, ckpt_path="first.ckpt")
    again.save_checkpoint("again.ckpt")
    data = loader(features(8), global_batch_size=8, data_parallel_size=layout.dp)
    (expected,) = again.validate(module, data, verbose=False)
    (found,) = again.validate(on_meta(Scaled), data, verbose=False, ckpt_path="again.ckpt", weights_only=False)
    return whole_state(again), found["val_loss"], expected["val_loss"]


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2), Layout(tp=2, save_distributed_checkpoint=True), Layout(dp=2, zero=3)],
    ids=str,
)
def test_they_go_on_as_one_process(workers: WorkerPools, layout: Layout) -> None:
    _, module = trained(None, Scaled, epochs=2)
    for state, found, expected in workers(layout.world_size).run(_resumed, layout):
        assert_same_state([state], module.state_dict())
        assert found == expected


class Unsaved(TinyMLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(4), persistent=False)


class Grown(TinyMLP):
    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(4, 4)


REFUSED = {
    "no checkpoint": (
        TinyMLP,
        None,
        PlanError,
        "Restore it from a checkpoint by the argument ckpt_path",
    ),
    "last": (TinyMLP, "last", PlanError, "the model has no weights yet"),
    "not saved": (Unsaved, "first.ckpt", PlanError, r"1 buffers are on the meta device .* \(mask, \.\.\.\)"),
    "missing": (Grown, "first.ckpt", CheckpointError, "missing in the checkpoint: more.weight, more.bias"),
}


def _refused() -> None:
    layout = Layout(pp=2)
    first, _ = trained(layout, TinyMLP, epochs=1)
    first.save_checkpoint("first.ckpt")
    for name, (model, path, error, message) in REFUSED.items():
        with pytest.raises(ThreeDError) as caught:
            trained(layout, partial(on_meta, model), epochs=2, ckpt_path=path)
        assert type(caught.value) is error, name
        assert re.search(message, str(caught.value)), f"{name}: {caught.value}"


def test_values_that_no_checkpoint_gives_are_refused(workers: WorkerPools) -> None:
    workers(2).run(_refused)
