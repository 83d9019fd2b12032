"""As Lightning's examples for beginners: LightningCLI, data modules, callbacks, its demo with an LSTM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos import LightningLSTM, SequenceSampler, SimpleLSTM
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from tests.examples.data import SIZE, images
from tests.examples.place import Outcome, Place, outcome

Batch = tuple[Tensor, Tensor]
PIXELS = SIZE * SIZE


class Digits(L.LightningDataModule):
    """Split at random by a generator of its own, never shuffled."""

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(42)
        self.train_part, self.val_part = random_split(images(48), [32, 16], generator=generator)
        self.test_part = images(16, seed=1)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_part, batch_size=self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_part, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test_part, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test_part, batch_size=self.batch_size)


class Autoencoder(L.LightningModule):
    """Logs the loss of every step, also in evaluation, and predicts images."""

    def __init__(self, hidden_dim: int = 16, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, PIXELS))

    def forward(self, x: Tensor) -> Tensor:
        decoded: Tensor = self.decoder(self.encoder(x))
        return decoded

    def shared_step(self, batch: Batch, prefix: str) -> Tensor:
        x = batch[0].view(len(batch[0]), -1)
        loss = F.mse_loss(x, self(x))
        self.log(f"{prefix}_loss", loss, on_step=True)
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.shared_step(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.shared_step(batch, "test")

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        generated: Tensor = self(batch[0].view(len(batch[0]), -1))
        return generated

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])


class Samples(Callback):
    """Runs the model on validation images after every epoch, and writes what it makes of them."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        shown, _ = next(iter(DataLoader(data.val_part, batch_size=3)))
        with torch.no_grad():
            pl_module.eval()
            made = pl_module(shown.view(3, -1).to(pl_module.device))
            pl_module.train()
        torch.save(made, f"made-{trainer.global_rank}-{trainer.current_epoch}.pt")


class SamplesOnRankZero(Samples):
    @rank_zero_only
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)


def fit_test_predict(place: Place, module: type[L.LightningModule], callbacks: list[Callback]) -> Outcome:
    cli = LightningCLI(
        module,
        Digits,
        args=[],
        run=False,
        seed_everything_default=1234,
        trainer_defaults=place.defaults(callbacks, max_epochs=2, enable_checkpointing=True),
        save_config_kwargs={"overwrite": True},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    tested = cli.trainer.test(ckpt_path="best", datamodule=cli.datamodule, verbose=False, weights_only=False)
    predicted = cli.trainer.predict(ckpt_path="best", datamodule=cli.datamodule, weights_only=False)
    made = [torch.load(path) for path in sorted(Path().glob("made-0-*.pt"))]
    return outcome(cli.trainer, {"tested": dict(tested[0]), "predicted": predicted, "made": made})


def autoencoder(place: Place) -> Outcome:
    return fit_test_predict(place, Autoencoder, [SamplesOnRankZero()])


def autoencoder_on_all_ranks(place: Place) -> Outcome:
    return fit_test_predict(place, Autoencoder, [Samples()])


VOCABULARY, CONTEXT = 32, 10


class SmallLSTM(LightningLSTM):
    """Goes on from the hidden state of the last batch."""

    def __init__(self) -> None:
        super().__init__(vocab_size=VOCABULARY)
        self.model = SimpleLSTM(vocab_size=VOCABULARY, ninp=16, nhid=16, nlayers=2, dropout=0.0)

    def prepare_data(self) -> None:
        pass

    def train_dataloader(self) -> DataLoader[Any]:
        text = torch.randint(0, VOCABULARY, (32, CONTEXT + 1), generator=torch.Generator().manual_seed(0))
        data: Any = TensorDataset(text[:, :-1], text[:, 1:])
        return DataLoader(data, batch_sampler=SequenceSampler(data, batch_size=8))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def demo_lstm(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=2, use_distributed_sampler=False, gradient_clip_val=0.25)
    trainer.fit(SmallLSTM())
    return outcome(trainer, None)
