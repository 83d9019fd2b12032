"""The models and data that ship with Lightning, as they are, but smaller."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.demos import (
    BoringDataModule,
    BoringModel,
    DemoModel,
    LightningLSTM,
    SequenceSampler,
    SimpleLSTM,
)
from lightning.pytorch.demos.boring_classes import (
    RandomDataset,
    RandomIterableDataset,
)
from torch.utils.data import DataLoader

from tests.examples.basics import VOCABULARY, sentences
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


def demo(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=1)
    trainer.fit(DemoModel(), DataLoader(RandomDataset(32, 32), batch_size=8))
    again = place.trainer(max_epochs=1, limit_train_batches=4)
    again.fit(DemoModel(), DataLoader(RandomIterableDataset(32, 64), batch_size=8))
    return outcome(again, None)


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
