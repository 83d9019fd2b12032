"""As Lightning's examples by domain: fine-tuning, adversarial networks, ImageNet, segmentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import Accuracy

from tests.examples.data import NUM_CLASSES, SEED, SIZE, drawn, images
from tests.examples.place import Outcome, Place, outcome

Batch = tuple[Tensor, Tensor]

# ---- computer_vision_fine_tuning.py


class Milestones(BaseFinetuning):
    """Trains the last part of a backbone from one epoch on, the rest from another on."""

    def __init__(self, milestones: tuple[int, int] = (1, 2), train_bn: bool = False) -> None:
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Optimizer) -> None:
        parts = {
            self.milestones[0]: pl_module.feature_extractor[-3:],
            self.milestones[1]: pl_module.feature_extractor[:-3],
        }
        if epoch in parts:
            self.unfreeze_and_add_param_group(modules=parts[epoch], optimizer=optimizer, train_bn=self.train_bn)


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.conv(x)))


def small_resnet(num_classes: int, width: int = 8) -> nn.Sequential:
    """A stem, residual blocks, pooling and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, num_classes),
    )


class Transfer(L.LightningModule):
    """A backbone without its last layers, and a classifier; metrics are logged as values."""

    def __init__(
        self,
        train_bn: bool = False,
        milestones: tuple[int, int] = (2, 4),
        batch_size: int = 8,
        lr: float = 1e-2,
        lr_scheduler_gamma: float = 0.1,
    ) -> None:
        super().__init__()
        self.lr, self.lr_scheduler_gamma, self.milestones = lr, lr_scheduler_gamma, milestones
        self.feature_extractor = nn.Sequential(*list(small_resnet(NUM_CLASSES).children())[:-2])
        self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 1))
        self.loss_func = F.binary_cross_entropy_with_logits
        self.train_acc = Accuracy(task="binary")
        self.valid_acc = Accuracy(task="binary")
        self.save_hyperparameters()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.feature_extractor(x).squeeze(-1).squeeze(-1))
        return logits

    def shared_step(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.forward(batch[0])
        truth = (batch[1] % 2).view((-1, 1)).type_as(batch[0])
        return self.loss_func(input=logits, target=truth), torch.sigmoid(logits), truth.int()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, scores, truth = self.shared_step(batch)
        self.log("train_acc", self.train_acc(scores, truth), prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss, scores, truth = self.shared_step(batch)
        self.log("val_loss", loss, prog_bar=True)
        self.log("val_acc", self.valid_acc(scores, truth), prog_bar=True)

    def configure_optimizers(self) -> Any:
        trainable = list(filter(lambda parameter: parameter.requires_grad, self.parameters()))
        optimizer = torch.optim.Adam(trainable, lr=self.lr, eps=1e-3)
        return [optimizer], [MultiStepLR(optimizer, milestones=self.milestones, gamma=self.lr_scheduler_gamma)]


class Pictures(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def prepare_data(self) -> None:
        Path("downloaded").touch()

    def train_dataloader(self) -> DataLoader[Any]:
        assert Path("downloaded").exists()
        return DataLoader(images(32, channels=3), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(images(16, channels=3, seed=1), batch_size=self.batch_size)


class TransferCLI(LightningCLI):
    """Links arguments of a callback, the data and the module."""

    def add_arguments_to_parser(self, parser: Any) -> None:
        parser.add_lightning_class_args(Milestones, "finetuning")
        parser.link_arguments("data.batch_size", "model.batch_size")
        parser.link_arguments("finetuning.milestones", "model.milestones")
        parser.link_arguments("finetuning.train_bn", "model.train_bn")


def fine_tuning(place: Place) -> Outcome:
    cli = TransferCLI(
        Transfer,
        Pictures,
        args=["fit", "--finetuning.milestones=[1,2]"],
        seed_everything_default=SEED,
        trainer_defaults=place.defaults(max_epochs=3),
        save_config_kwargs={"overwrite": True},
    )
    groups = [group["lr"] for group in cli.trainer.optimizers[0].param_groups]
    return outcome(cli.trainer, groups)


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


class ImageNet(L.LightningModule):
    """Splits its batch size among the processes; metrics are logged as objects."""

    def __init__(
        self, lr: float = 0.05, momentum: float = 0.9, weight_decay: float = 1e-4, batch_size: int = 16
    ) -> None:
        super().__init__()
        self.lr, self.momentum, self.weight_decay, self.batch_size = lr, momentum, weight_decay, batch_size
        self.model = small_resnet(NUM_CLASSES)
        self.train_dataset: Dataset[Any] | None = None
        self.eval_dataset: Dataset[Any] | None = None
        self.train_acc1 = Accuracy(task="multiclass", num_classes=NUM_CLASSES, top_k=1)
        self.train_acc2 = Accuracy(task="multiclass", num_classes=NUM_CLASSES, top_k=2)
        self.eval_acc1 = Accuracy(task="multiclass", num_classes=NUM_CLASSES, top_k=1)
        self.eval_acc2 = Accuracy(task="multiclass", num_classes=NUM_CLASSES, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        logits = self.model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log("train_loss", loss)
        self.train_acc1(logits, batch[1])
        self.train_acc2(logits, batch[1])
        self.log("train_acc1", self.train_acc1, prog_bar=True)
        self.log("train_acc2", self.train_acc2, prog_bar=True)
        return loss

    def eval_step(self, batch: Batch, prefix: str) -> Tensor:
        logits = self.model(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.log(f"{prefix}_loss", loss)
        self.eval_acc1(logits, batch[1])
        self.eval_acc2(logits, batch[1])
        self.log(f"{prefix}_acc1", self.eval_acc1, prog_bar=True)
        self.log(f"{prefix}_acc2", self.eval_acc2, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.eval_step(batch, "val")

    def test_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.eval_step(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        return [optimizer], [LambdaLR(optimizer, lambda epoch: 0.1 ** (epoch // 30))]

    def setup(self, stage: str) -> None:
        if isinstance(self.trainer.strategy, ParallelStrategy):
            self.batch_size = int(self.batch_size / max(1, self.trainer.strategy.num_processes))
        if stage == "fit":
            self.train_dataset = images(32, channels=3)
        self.eval_dataset = images(16, channels=3, seed=1)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.train_dataset, batch_size=self.batch_size, shuffle=True, pin_memory=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.eval_dataset, batch_size=self.batch_size, pin_memory=True)  # type: ignore[arg-type]

    def test_dataloader(self) -> DataLoader[Any]:
        return self.val_dataloader()


def imagenet(place: Place) -> Outcome:
    """The batch size is given by the number of processes that the strategy counts, so that steps have 8 samples."""
    defaults = place.defaults(
        [TQDMProgressBar(refresh_rate=10), ModelCheckpoint(dirpath="kept", monitor="val_acc1", mode="max")],
        max_epochs=2,
        benchmark=True,
        enable_checkpointing=True,
        enable_progress_bar=True,
    )
    cli = LightningCLI(
        ImageNet,
        args=["fit", f"--model.batch_size={8 * place.devices}"],
        trainer_defaults=defaults,
        seed_everything_default=42,
        save_config_kwargs={"overwrite": True},
    )
    tested = cli.trainer.test(cli.model, ckpt_path="best", verbose=False, weights_only=False)
    return outcome(cli.trainer, dict(tested[0]))


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
