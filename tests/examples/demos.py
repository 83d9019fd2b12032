"""The models and data that ship with Lightning, as they are, but smaller."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.demos import (
    BoringDataModule,
    BoringModel,
    DemoModel,
    LightningLSTM,
    LightningTransformer,
    SequenceSampler,
    SimpleLSTM,
    Transformer,
)
from lightning.pytorch.demos.boring_classes import (
    IterableBoringDataModule,
    ManualOptimBoringModel,
    Net,
    RandomDataset,
    RandomIterableDataset,
)
from torch import Tensor
from torch.utils.data import DataLoader

from tests.examples.basics import VOCABULARY, sentences
from tests.examples.data import images
from tests.examples.place import Outcome, Place, outcome


def run_all(trainer: L.Trainer, module: L.LightningModule, **data: Any) -> Any:
    trainer.fit(module, **data)
    trainer.validate(module, verbose=False, **data)
    trainer.test(module, verbose=False, **data)
    return trainer.predict(module, **data)


def boring(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=2, limit_train_batches=4, limit_val_batches=2, limit_test_batches=2)
    first = run_all(trainer, BoringModel())
    again = place.trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=2)
    return outcome(again, [first, run_all(again, BoringModel(), datamodule=BoringDataModule())])


class Narrow(BoringModel):
    """For data of four features, also in several loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def step(self, batch: Any) -> Tensor:
        batches = batch if isinstance(batch, list | tuple) else [batch]
        losses: Tensor = torch.stack([self.loss(self(one)) for one in batches]).mean()
        return losses

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"x": self.step(batch)}


def iterable_data(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=2)
    trainer.fit(Narrow(), datamodule=IterableBoringDataModule())
    return outcome(trainer, None)


def boring_by_hand(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=1, limit_train_batches=4, limit_val_batches=2)
    trainer.fit(ManualOptimBoringModel())
    return outcome(trainer, None)


def demo(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=1)
    trainer.fit(DemoModel(), DataLoader(RandomDataset(32, 32), batch_size=8))
    again = place.trainer(max_epochs=1, limit_train_batches=4)
    again.fit(DemoModel(), DataLoader(RandomIterableDataset(32, 64), batch_size=8))
    return outcome(again, None)


class SmallTransformer(LightningTransformer):
    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY)
        self.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhead=2, nhid=32, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(sentences(32), batch_size=8)


def demo_transformer(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=2)
    trainer.fit(SmallTransformer())
    return outcome(trainer, None)


class SmallLSTM(LightningLSTM):
    """Goes on from the hidden state of the last batch."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY)
        self.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader[Any]:
        data: Any = sentences(32)
        return DataLoader(data, batch_sampler=SequenceSampler(data, batch_size=8))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def demo_lstm(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=2, use_distributed_sampler=False, gradient_clip_val=0.25)
    trainer.fit(SmallLSTM())
    return outcome(trainer, None)


class Convolutions(L.LightningModule):
    """Lightning's net for digits of 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        for part in (self.net.dropout1, self.net.dropout2):
            part.p = 0.0

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.nll_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adadelta(self.parameters(), lr=0.1, eps=1e-3)


def demo_net(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=1)
    trainer.fit(Convolutions(), DataLoader(images(16, size=28), batch_size=8))
    return outcome(trainer, None)
