"""A GAN with manual optimization learns a ring of points in the plane: two optimizers, each with its own loss.

python examples/gan.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy


def network(inputs: int, outputs: int, width: int = 64) -> nn.Sequential:
    """A perceptron of three layers."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(inputs, width), nn.LeakyReLU(0.2)),
        nn.Sequential(nn.Linear(width, width), nn.LeakyReLU(0.2)),
        nn.Linear(width, outputs),
    )


class GAN(L.LightningModule):
    """A batch is points (B, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = network(8, 2), network(2, 1)

    def forward(self, noise: Tensor) -> Tensor:
        """Points (B, 2) from noise (B, 8)."""
        points: Tensor = self.generator(noise)
        return points

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        """Train the critic to tell points apart, then the generator to deceive it."""
        of_generator, of_critic = self.optimizers()
        noise = torch.randn(len(batch), 8, device=self.device)

        self.toggle_optimizer(of_critic)
        loss = F.softplus(-self.critic(batch)).mean() + F.softplus(self.critic(self(noise).detach())).mean()
        of_critic.zero_grad()
        self.manual_backward(loss)
        of_critic.step()
        self.untoggle_optimizer(of_critic)

        self.toggle_optimizer(of_generator)
        deceived = F.softplus(-self.critic(self(noise))).mean()
        of_generator.zero_grad()
        self.manual_backward(deceived)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log_dict({"critic": loss, "generator": deceived}, prog_bar=True)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log how far generated points are from the ring."""
        points = self(torch.randn(len(batch), 8, device=self.device))
        self.log("distance", (points.norm(dim=1) - 1).abs().mean(), sync_dist=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """One optimizer for each network."""
        return [torch.optim.Adam(net.parameters(), lr=5e-3, betas=(0.5, 0.9)) for net in (self.generator, self.critic)]


def ring(num: int) -> Tensor:
    """Points about the unit circle, (num, 2)."""
    angles = 2 * torch.pi * torch.rand(num, 1)
    return torch.cat([angles.cos(), angles.sin()], dim=1) + 0.02 * torch.randn(num, 2)


def main(devices: int = 2, max_steps: int = 600, pipeline_parallel_size: int = 1) -> None:
    """Train, and tell how far generated points are from the ring before and after.

    Args:
        devices: Number of GPUs, or of processes where there are none.
        max_steps: Number of optimizer steps, of both networks together.
        pipeline_parallel_size: Number of pipeline stages.
    """
    L.seed_everything(1)
    strategy = ThreeDStrategy(pipeline_parallel_size=pipeline_parallel_size)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=max_steps)
    model = GAN()
    training, validation = DataLoader(ring(65536), batch_size=64), DataLoader(ring(512), batch_size=64)
    before = trainer.validate(model, validation, verbose=False)[0]["distance"]
    trainer.fit(model, training)
    after = trainer.validate(model, validation, verbose=False)[0]["distance"]
    if trainer.is_global_zero:
        print(f"distance {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
