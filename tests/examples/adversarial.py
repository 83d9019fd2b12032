"""As Lightning's example of adversarial networks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.examples.data import SIZE, drawn, images
from tests.examples.place import Outcome, Place, outcome

Batch = tuple[Tensor, Tensor]


class Generator(nn.Module):
    def __init__(self, latent_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(latent_dim, 16),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(16, 32),
            nn.BatchNorm1d(32, 0.8),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Linear(32, SIZE * SIZE),
            nn.Tanh(),
        )

    def forward(self, z: Tensor) -> Tensor:
        made: Tensor = self.model(z)
        return made.view(made.size(0), 1, SIZE, SIZE)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(SIZE * SIZE, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 16), nn.Linear(16, 1)
        )

    def forward(self, picture: Tensor) -> Tensor:
        judged: Tensor = self.model(picture.view(picture.size(0), -1))
        return judged


class Gallery(Logger):
    """Keeps pictures, on rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: list[Tensor] = []

    @property
    def name(self) -> str:
        return "gallery"

    @property
    def version(self) -> int:
        return 0

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        return self

    def add_image(self, name: str, picture: Tensor, epoch: int) -> None:
        self.pictures.append(picture.detach().clone())

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Adversarial(L.LightningModule):
    """Two optimizers, by hand; each toggled for its turn."""

    def __init__(self, lr: float = 2e-3, b1: float = 0.5, b2: float = 0.999, latent_dim: int = 12) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(latent_dim), Discriminator()
        self.validation_z = torch.randn(8, latent_dim)
        self.example_input_array = torch.zeros(2, latent_dim)

    def forward(self, z: Tensor) -> Tensor:
        made: Tensor = self.generator(z)
        return made

    def training_step(self, batch: Batch) -> None:
        pictures = batch[0]
        of_generator, of_discriminator = self.optimizers()  # type: ignore[misc]
        z = drawn(pictures, self.hparams["latent_dim"]).type_as(pictures)
        real = torch.ones(pictures.size(0), 1).type_as(pictures)
        fake = torch.zeros(pictures.size(0), 1).type_as(pictures)

        self.toggle_optimizer(of_generator)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), real)
        of_generator.zero_grad()
        self.manual_backward(g_loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)

        self.toggle_optimizer(of_discriminator)
        of_real = F.binary_cross_entropy_with_logits(self.discriminator(pictures), real)
        of_fake = F.binary_cross_entropy_with_logits(self.discriminator(self(z).detach()), fake)
        d_loss = (of_real + of_fake) / 2
        of_discriminator.zero_grad()
        self.manual_backward(d_loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def configure_optimizers(self) -> Any:
        betas = (self.hparams["b1"], self.hparams["b2"])
        settings = {"lr": self.hparams["lr"], "betas": betas, "eps": 1e-3}
        of_generator = torch.optim.Adam(self.generator.parameters(), **settings)
        return of_generator, torch.optim.Adam(self.discriminator.parameters(), **settings)

    def on_train_epoch_end(self) -> None:
        weight: Any = self.generator.model[0].weight
        made = self(self.validation_z.type_as(weight))
        for logger in self.loggers:
            logger.experiment.add_image("generated_images", made, self.current_epoch)


def adversarial(place: Place) -> Outcome:
    gallery = Gallery()
    trainer = place.trainer(max_epochs=2, logger=gallery)
    trainer.fit(Adversarial(), DataLoader(images(32), batch_size=8, shuffle=True))
    assert len(gallery.pictures) == (2 if trainer.is_global_zero else 0)
    return outcome(trainer, gallery.pictures)
