"""As Lightning's examples by domain: fine-tuning, adversarial networks, ImageNet, segmentation."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.examples.data import NUM_CLASSES, SIZE, drawn, images
from tests.examples.place import Outcome, Place, outcome

Batch = tuple[Tensor, Tensor]

# ---- computer_vision_fine_tuning.py


# ---- generative_adversarial_net.py


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


# ---- imagenet.py


# ---- semantic_segmentation.py

VOID = 250


def masked_images(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    """``(image, class of each pixel)``, some of which are `VOID`."""
    generator = torch.Generator().manual_seed(0)
    pictures = torch.rand(num_samples, 3, SIZE, SIZE, generator=generator)
    masks = torch.randint(0, NUM_CLASSES, (num_samples, SIZE, SIZE), generator=generator)
    masks[torch.rand(masks.shape, generator=generator) < 0.3] = VOID
    return TensorDataset(pictures, masks.to(torch.uint8))


class DoubleConv(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(num_in, num_out, kernel_size=3, padding=1),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(num_out, num_out, kernel_size=3, padding=1),
            nn.BatchNorm2d(num_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        convolved: Tensor = self.net(x)
        return convolved


class Down(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.MaxPool2d(kernel_size=2, stride=2), DoubleConv(num_in, num_out))

    def forward(self, x: Tensor) -> Tensor:
        smaller: Tensor = self.net(x)
        return smaller


class Up(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.upsample = nn.ConvTranspose2d(num_in, num_in // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(num_in, num_out)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        larger = self.upsample(x)
        height, width = skipped.shape[2] - larger.shape[2], skipped.shape[3] - larger.shape[3]
        larger = F.pad(larger, [width // 2, width - width // 2, height // 2, height - height // 2])
        joined: Tensor = self.conv(torch.cat([skipped, larger], dim=1))
        return joined


class UNet(nn.Module):
    """Blocks of several classes in one ModuleList, and a list of what they gave."""

    def __init__(self, num_layers: int = 3, features: int = 8) -> None:
        super().__init__()
        self.num_layers = num_layers
        layers: list[nn.Module] = [DoubleConv(3, features)]
        for _ in range(num_layers - 1):
            layers.append(Down(features, features * 2))
            features *= 2
        for _ in range(num_layers - 1):
            layers.append(Up(features, features // 2))
            features //= 2
        layers.append(nn.Conv2d(features, NUM_CLASSES, kernel_size=1))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        given = [self.layers[0](x)]
        for layer in self.layers[1 : self.num_layers]:
            given.append(layer(given[-1]))
        for i, layer in enumerate(self.layers[self.num_layers : -1]):
            given[-1] = layer(given[-1], given[-2 - i])
        logits: Tensor = self.layers[-1](given[-1])
        return logits


class Segmentation(L.LightningModule):
    """Ignores void pixels; its step returns more than the loss."""

    def __init__(self, batch_size: int = 8, lr: float = 1e-2) -> None:
        super().__init__()
        self.batch_size, self.lr = batch_size, lr
        self.net = UNet()
        self.trainset, self.validset = masked_images(32), masked_images(16)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x)
        return logits

    def training_step(self, batch: Batch, batch_nb: int) -> Any:
        loss = F.cross_entropy(self(batch[0].float()), batch[1].long(), ignore_index=VOID)
        logged = {"train_loss": loss}
        return {"loss": loss, "log": logged, "progress_bar": logged}

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0].float()), batch[1].long(), ignore_index=VOID)
        self.log("val_loss", loss, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=self.lr, eps=1e-3)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=10)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.trainset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.validset, batch_size=self.batch_size)


def segmentation(place: Place) -> Outcome:
    trainer = place.trainer(max_epochs=2)
    trainer.fit(Segmentation())
    return outcome(trainer, None)
