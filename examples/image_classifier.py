"""A residual network tells eight kinds of noisy stripes apart: data parallel, with BatchNorm and a metric.

python examples/image_classifier.py
python examples/image_classifier.py --pipeline_parallel_size 2        half of its blocks on each device
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_3d import ThreeDStrategy

CLASSES = 8


class Residual(nn.Module):
    """Two convolutions around a shortcut, (B, C, H, W) -> the same."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the convolutions make of it."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class Classifier(L.LightningModule):
    """A batch is (images (B, 1, 16, 16), labels (B,))."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.ModuleList(Residual(16) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)
        self.accuracy = MulticlassAccuracy(CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, CLASSES)."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy."""
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy."""
        images, labels = batch
        logits = self(images)
        self.accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def stripes(num: int) -> TensorDataset:
    """Images of stripes whose angle is the label, in noise."""
    labels = torch.randint(CLASSES, (num,))
    y, x = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angles = labels[:, None, None] * torch.pi / CLASSES
    waves = torch.sin(x * angles.cos() + y * angles.sin() + 6 * torch.rand(num, 1, 1))
    return TensorDataset((waves + 0.5 * torch.randn(num, 16, 16))[:, None], labels)


def main(devices: int = 2, max_steps: int = 100, pipeline_parallel_size: int = 1) -> None:
    """Train, and tell loss and accuracy before and after.

    Args:
        devices: Number of GPUs, or of processes where there are none.
        max_steps: Number of optimizer steps.
        pipeline_parallel_size: Number of pipeline stages.
    """
    L.seed_everything(1)
    strategy = ThreeDStrategy(pipeline_parallel_size=pipeline_parallel_size, zero={"stage": 2})
    trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=max_steps)
    model = Classifier()
    training, validation = DataLoader(stripes(8192), batch_size=32), DataLoader(stripes(256), batch_size=32)
    before = trainer.validate(model, validation, verbose=False)[0]
    trainer.fit(model, training)
    after = trainer.validate(model, validation, verbose=False)[0]
    if trainer.is_global_zero:
        print(f"accuracy {before['accuracy']:.2f} -> {after['accuracy']:.2f}")
        print(f"val_loss {before['val_loss']:.3f} -> {after['val_loss']:.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
