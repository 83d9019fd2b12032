"""Steps that use what training makes first, data in glue, and types of all kinds, in every layout as in one process."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils.data import Dataset

from lightning_3d import StepError
from lightning_3d.errors import TraceError
from tests.models import TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

LAYOUTS = (Layout(pp=2), Layout(tp=2))


class Blocks(TinyMLP):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__(width=8, num_layers=2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


class Prepares(L.Callback):
    """A callback that gives the module what its step reads, and counts."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.append(trainer.current_epoch)
        pl_module.loss = nn.MSELoss()


class Prepared(Blocks):
    """Its steps have no ``batch_idx``; they read optimizers, schedulers, and what hooks leave."""

    def on_fit_start(self) -> None:
        self.register_buffer("weights", torch.linspace(0.5, 1.0, 4))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(1.5)

    def on_train_start(self) -> None:
        self.log("started", 1.0)
        self.factor = 0.5

    def on_train_epoch_start(self) -> None:
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.number = batch_idx

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        inputs, targets = batch
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        rate = optimizer.param_groups[0]["lr"]  # type: ignore[union-attr]
        self.log("rate", rate)
        self.log("next_rate", schedule.get_last_lr()[0])  # type: ignore[union-attr]
        loss = self.loss(self(inputs) * self.weights, targets)
        self.losses.append(loss.detach())
        return loss * self.factor * (1 + rate + self.number + self.trainer.num_val_batches[0])

    def on_train_epoch_end(self) -> None:
        self.log("mean_loss", torch.stack(self.losses).mean())

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:  # type: ignore[override]
        super().validation_step(batch, 0)


class Variational(Blocks):
    """Distributions between blocks, whose arguments torch checks by default."""

    def forward(self, x: Tensor) -> Tensor:
        first, *between, last = self.layers
        x = first(x)
        for layer in between:
            posterior = Normal(x, x.exp())
            self.divergence = kl_divergence(posterior, Normal(torch.zeros_like(x), 1.0)).mean()
            x = layer(posterior.mean)
        return last(x)  # type: ignore[no-any-return]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = -Independent(Normal(self(inputs), 1.0), 1).log_prob(targets).mean()
        return loss + 0.1 * self.divergence


class Reading(Blocks):
    """Glue that reads data between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        first, *between, last = self.layers
        x = first(x)
        if torch.isnan(x).any():
            raise ValueError("no number")
        x = x / max(1.0, x.abs().max().item()) + x[x > 0].mean()
        for layer in between:
            x = layer(x)
        return last(x)  # type: ignore[no-any-return]


class Registered(type):
    """A metaclass that knows all classes, and asks something of each."""

    known: ClassVar[dict[str, type]] = {}

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> None:
        super().__init__(name, bases, namespace)
        assert "forward" in namespace
        assert name not in cls.known
        cls.known[name] = cls


@dataclass(frozen=True)
class Signal:
    """A dataclass that changes what it gets, and needs more than its fields."""

    values: Tensor
    factor: InitVar[float]
    spectrum: Tensor = field(init=False)

    def __post_init__(self, factor: float) -> None:
        object.__setattr__(self, "values", self.values * factor)
        object.__setattr__(self, "spectrum", torch.fft.rfft(self.values))


class Filter(nn.Module, metaclass=Registered):
    """A block that gives such a dataclass, with buffers of rare dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("turn", torch.polar(torch.ones(5), torch.arange(5.0)))
        self.register_buffer("codes", torch.arange(4).to(torch.uint16))
        self.register_buffer("scale", torch.tensor(0.5).to(torch.float8_e4m3fn))
        self.register_buffer("bank", torch.empty(0, 8))

    def forward(self, signal: Signal) -> Signal:
        assert signal.spectrum.is_complex()
        turned = torch.fft.irfft(signal.spectrum * self.turn, n=8)
        rows = torch.cat([self.bank, signal.values + self.linear(turned)])  # type: ignore[list-item]
        return Signal(rows, self.scale.float().item())  # type: ignore[operator,union-attr]


class Abstract(ABC, nn.Module):
    """A base class with a metaclass and slots."""

    __slots__ = ("gain",)


class Output(Abstract):
    """A block of that class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(8, 4), 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.gain  # type: ignore[no-any-return]


class Types(TinyMLP):
    """Metaclasses, dataclasses, complex and empty tensors, all kinds of dtypes, and objects of the user's."""

    def __init__(self) -> None:
        super().__init__(width=8, num_layers=2)
        self.layers = nn.ModuleList(Filter() for _ in range(2))  # type: ignore[assignment]
        self.head = Output()
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x: Tensor) -> Tensor:
        signal = Signal(x, 1.0)
        for layer in self.layers:
            signal = layer(signal)
        y: Tensor = self.head(signal.values)
        return y + signal.spectrum.abs().mean()


class Fetching(Blocks):
    """A step that fetches its batches."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, *_ = next(dataloader_iter)
        return super().training_step(batch, 0)


def _data(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    return features(num_samples)


def _fit(layout: Layout | None, model: Callable[[], L.LightningModule]) -> tuple[dict[str, Tensor], dict[str, float]]:
    prepares = Prepares()
    trainer, _ = fitted(layout, model, data=_data, callbacks=[prepares])
    assert prepares.epochs == [0, 1]
    is_float8 = {fqn: value.dtype == torch.float8_e4m3fn for fqn, value in whole_state(trainer).items()}
    state = {fqn: value.float() if is_float8[fqn] else value for fqn, value in whole_state(trainer).items()}
    assert any(is_float8.values()) == (model is Types)  # compared as fp32: torch compares float8 by bits only
    return state, {name: float(value) for name, value in trainer.callback_metrics.items()}


def _fit_all(layout: Layout | None) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    models: list[Callable[[], L.LightningModule]] = [Prepared, Variational, Types]
    if layout is None or layout.pp == 1:
        models.append(Reading)
    return [_fit(layout, model) for model in models]


def _refused(layout: Layout) -> list[str]:
    told = []
    for model, error in ((Reading, TraceError), (Fetching, StepError)):
        if model is Fetching or layout.pp > 1:
            with pytest.raises(error) as caught:
                fitted(layout, model, data=_data)
            told.append(str(caught.value))
    return told


@pytest.fixture(scope="module")
def expected(workers: WorkerPools) -> list[tuple[dict[str, Tensor], dict[str, float]]]:
    """Trained by one process."""
    return workers(1).run(_fit_all, None)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_find_what_training_leaves_them(
    workers: WorkerPools, layout: Layout, expected: list[tuple[dict[str, Tensor], dict[str, float]]]
) -> None:
    for rank in workers(2).run(_fit_all, layout):
        for (state, logged), (of_one, logged_by_one) in zip(rank, expected, strict=False):
            assert_same_state([state], of_one)
            assert logged == pytest.approx(logged_by_one, abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_remains_refused_says_the_fix(workers: WorkerPools, layout: Layout) -> None:
    for told in workers(2).run(_refused, layout):
        assert "Let it take the batch: def training_step(self, batch, batch_idx)" in told[-1]
        if layout.pp > 1:
            assert "__bool__" in told[0]
            assert "or use pipeline_parallel_size=1" in told[0]
