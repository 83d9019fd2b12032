"""`ThreeDStrategy.summon_full_params`: whole parameters for a while, in every layout."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import ThreeDStrategy
from tests.models import TinyGPT, loader, tokens, training_loader
from tests.parity import QUIET, Job, Layout, ReferenceRun, run_reference
from tests.workers import WorkerPools

LAYOUTS = (
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, tp=2, schedule="zbv"),
)


def _values(module: nn.Module) -> dict[str, Tensor]:
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())
    return {fqn: parameter.detach().clone() for fqn, parameter in module.named_parameters()}


def _summon(layout: Layout) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    strategy = layout.strategy()
    assert isinstance(strategy, ThreeDStrategy)
    trainer = L.Trainer(strategy=strategy, devices=layout.world_size, max_epochs=1, enable_checkpointing=False, **QUIET)
    L.seed_everything(1, verbose=False)
    module, data = TinyGPT(), tokens(40)
    parts = [torch.utils.data.Subset(data, range(24)), torch.utils.data.Subset(data, range(24, 40))]
    train = training_loader(parts[0], global_batch_size=8, data_parallel_size=layout.dp)
    trainer.fit(module, train, loader(parts[1], global_batch_size=8, data_parallel_size=layout.dp))
    before = dict(module.named_parameters())
    with strategy.summon_full_params(writeback=False):
        read = _values(module)
        module.norm.weight.data.zero_()
    assert all(parameter is before[fqn] for fqn, parameter in module.named_parameters())
    with torch.no_grad(), strategy.summon_full_params(module.blocks):
        for parameter in module.blocks.parameters():
            parameter.mul_(2)
    with strategy.summon_full_params():
        written = _values(module)
    trainer.validate(module, loader(parts[1], global_batch_size=8, data_parallel_size=layout.dp), verbose=False)
    with strategy.summon_full_params(module.head, writeback=False):
        head = _values(module.head)
    return read, written, head


@pytest.fixture(scope="module")
def reference() -> ReferenceRun:
    return run_reference(Job(model=partial(TinyGPT), steps=3))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parameters_are_whole_to_be_read_and_written(
    workers: WorkerPools, reference: ReferenceRun, layout: Layout
) -> None:
    for read, written, head in workers(layout.world_size).run(_summon, layout):
        assert read.keys() == written.keys() == reference.parameters.keys()
        for fqn, value in read.items():
            torch.testing.assert_close(value, reference.weights[fqn], atol=1e-5, rtol=0)
            torch.testing.assert_close(written[fqn], value * 2 if fqn.startswith("blocks.") else value)
        torch.testing.assert_close(head["weight"], read["tokens.weight"])
