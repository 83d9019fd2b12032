"""The module before, in and after `fit`, `validate` and `predict` in every layout, by habits of DDP."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_3d import StepError, ThreeDStrategy
from tests.models import loader, tokens
from tests.parity import Layout, fitted
from tests.test_averaging import Model
from tests.workers import WorkerPools

LAYOUTS = (Layout(dp=2, zero=3), Layout(pp=2, mode="inline"), Layout(tp=2))  # of statistics between blocks

INPUTS = torch.arange(16)[None]


class Recurrent(Model):
    """A layer that keeps references to its weights, a norm with statistics, and a module that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.statistics = nn.BatchNorm1d(16, affine=False)
        self.last = self.norm

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        x, _ = self.recurrent(x)
        x = self.statistics(x.flatten(0, 1)).view_as(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _plain() -> Recurrent:
    """A model of one process with other weights."""
    torch.manual_seed(5)
    return Recurrent().eval()


class _LoadsInHook(L.Callback):
    """Loads whole weights when the model is parallel already."""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.load_state_dict(_plain().state_dict())
        strategy = trainer.strategy
        assert isinstance(strategy, ThreeDStrategy)
        with strategy.summon_full_params():
            pl_module.eval()
            torch.testing.assert_close(pl_module(INPUTS), _plain()(INPUTS))
            pl_module.train()


@contextmanager
def _parts_told() -> Iterator[None]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    told = ["a file of it would not hold the model" in str(warning.message) for warning in caught]
    assert any(told) == (torch.distributed.get_rank() == 0)


def _use(layout: Layout) -> None:
    trainer, module = fitted(layout, Recurrent, callbacks=[_LoadsInHook()])
    strategy = cast(ThreeDStrategy, trainer.strategy)
    module.eval()
    with strategy.summon_full_params():
        whole = copy.deepcopy(module)
        trained = {fqn: value.clone() for fqn, value in module.state_dict().items()}
        expected = module(INPUTS)
    assert all(type(parameter) is nn.Parameter for parameter in whole.parameters())
    torch.testing.assert_close(whole(INPUTS), expected)  # without the other ranks
    plain = _plain()
    plain.load_state_dict(trained)
    torch.testing.assert_close(plain(INPUTS), expected)
    buffer = io.BytesIO()
    with _parts_told():
        torch.save(module.state_dict(), buffer)
    _call(layout, module, expected)
    _load_and_convert(strategy, module, trained)
    _summon(strategy, module, expected)
    _go_on(layout, trainer, module, whole)


def _call(layout: Layout, module: L.LightningModule, expected: Tensor) -> None:
    for called in (module, copy.deepcopy(module)):
        if layout.zero == 3:
            with pytest.raises(StepError, match="summon_full_params"):
                called(INPUTS)
        else:
            torch.testing.assert_close(called(INPUTS), expected)


def _load_and_convert(strategy: ThreeDStrategy, module: L.LightningModule, trained: dict[str, Tensor]) -> None:
    own = {fqn: value.clone() for fqn, value in module.state_dict().items()}
    other = _plain()
    result = module.load_state_dict(other.state_dict())
    assert not result.missing_keys
    with strategy.summon_full_params(writeback=False):
        torch.testing.assert_close(module(INPUTS), other(INPUTS))
    module.load_state_dict(own)  # this rank's parts
    with strategy.summon_full_params():
        assert all(torch.equal(value, trained[fqn]) for fqn, value in module.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*extra"):
        module.load_state_dict({**trained, "extra": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*norm.weight"):
        module.load_state_dict({fqn: value for fqn, value in trained.items() if fqn != "norm.weight"})
    with pytest.raises(RuntimeError, match=r"size mismatch for norm.weight"):
        module.load_state_dict({**trained, "norm.weight": torch.ones(3)})
    module.load_state_dict(trained)
    module.to("cpu")


def _summon(strategy: ThreeDStrategy, module: L.LightningModule, expected: Tensor) -> None:
    statistics = cast(nn.BatchNorm1d, module.statistics)
    with strategy.summon_full_params(writeback=False):
        mean = statistics.running_mean.clone()  # type: ignore[union-attr]
        module.train()(INPUTS)  # changes the statistics
        assert not torch.equal(statistics.running_mean, mean)  # type: ignore[arg-type]
        module.eval()
        nn.init.zeros_(module.norm.weight)  # type: ignore[arg-type,union-attr]
        with strategy.summon_full_params(writeback=False):
            assert not torch.allclose(module(INPUTS), expected)
    with strategy.summon_full_params():
        torch.testing.assert_close(module(INPUTS), expected)
        module.norm.weight = nn.Parameter(2 * module.norm.weight.detach())  # type: ignore[union-attr,operator]
        module(INPUTS).sum().backward()
    with strategy.summon_full_params():
        assert not torch.allclose(module(INPUTS), expected)
        module.norm.weight.data.div_(2)  # type: ignore[union-attr,operator]
    average = torch.optim.swa_utils.AveragedModel(module)
    with strategy.summon_full_params(average):
        torch.testing.assert_close(average(INPUTS), expected)
    with pytest.raises(StepError, match="nor a copy of it"), strategy.summon_full_params(nn.Linear(2, 2)):
        pass


def _go_on(layout: Layout, trainer: L.Trainer, module: L.LightningModule, whole: L.LightningModule) -> None:
    data = loader(tokens(16), global_batch_size=8, data_parallel_size=layout.dp)
    trainer.save_checkpoint("after.ckpt")
    trainer.validate(module, data, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, data, data)
    assert trainer.current_epoch == 3
    again, copied = fitted(layout, lambda: whole)
    assert copied is whole
    assert again.state.finished
    again.strategy.barrier()
    loaded = Recurrent.load_from_checkpoint("after.ckpt", weights_only=False)
    assert loaded(INPUTS).isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_module_is_usable_after_fit(workers: WorkerPools, layout: Layout) -> None:
    workers(layout.world_size).run(_use, layout)
