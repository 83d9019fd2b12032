"""Kinds of code in LightningModules of other packages: the numbers of one process in dp 2, pp 2 and tp 2."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.model.blocks import find_blocks
from tests import architectures as a
from tests.models import features
from tests.parity import Job, Layout, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

WIDTH = 32
LAYOUTS = (Layout(dp=2), Layout(pp=2, num_microbatches=2), Layout(tp=2))


class KeepsItsOutputClass(a.Trained):
    """Makes the class of its outputs in every step, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4))

    def compute_loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        self.output_class = namedtuple("Output", ["prediction"])
        output = self.output_class(self.layers(inputs))
        return F.mse_loss(output.prediction, targets)


class Selection(nn.Module):
    """Scales with modules that it is given, which others have, too."""

    def __init__(self, scalers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.scalers = nn.ModuleDict()
        for name, scaler in scalers.items():
            self.scalers[name] = scaler
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for scaler in self.scalers.values():
            x = scaler(x).tanh()
        result: Tensor = self.inner(x)
        return result


class SharesModules(a.Trained):
    """The same layers are held by the module itself, by a part that is a block and by one that is not."""

    def __init__(self, *, own_come_first: bool) -> None:
        super().__init__()
        scalers = {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second")}
        self.embed = nn.Linear(8, WIDTH)
        if own_come_first:
            self.scalers = nn.ModuleDict(scalers)
        self.encoder = Selection({"first": scalers["first"]})
        self.decoder = Selection(scalers)
        if not own_come_first:
            self.scalers = nn.ModuleDict(scalers)
        self.head = nn.Linear(WIDTH, 4)

    def compute_loss(self, batch: Any) -> Tensor:
        inputs, targets = batch
        return F.mse_loss(self.head(self.decoder(self.encoder(self.embed(inputs)))), targets)


class AsksForTheDeviceOfItsParameters(KeepsItsOutputClass):
    """Makes tensors on the one device that its parameters are on, and moves its batch there."""

    def compute_loss(self, batch: Any) -> Tensor:
        (device,) = {parameter.device for parameter in self.parameters()}
        inputs, targets = (tensor.to(next(self.parameters()).device) for tensor in batch)
        scales = torch.linspace(1, 2, targets.shape[1], device=device)
        last = self.layers[-1].weight
        return F.mse_loss(self.layers(inputs) * scales.to(last.device), targets.to(device=last.device))


SHARING = [partial(SharesModules, own_come_first=first) for first in (True, False)]


@pytest.mark.parametrize("own_come_first", [True, False])
def test_no_block_holds_another(own_come_first: bool) -> None:
    blocks = find_blocks(SharesModules(own_come_first=own_come_first))
    scalers = {"scalers.first", "scalers.second"}
    if not own_come_first:
        scalers = {"encoder.scalers.first", "decoder.scalers.second"}
    assert set(blocks) == scalers | {"embed", "encoder.inner", "decoder.inner", "head"}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("model", [KeepsItsOutputClass, *SHARING, AsksForTheDeviceOfItsParameters])
def test_module_trains_as_in_one_process(workers: WorkerPools, model: Any, layout: Layout) -> None:
    job = Job(model=model, data=features)
    assert_parity(run_reference(job), run_layout(workers, job, layout), tolerance=1e-5)
