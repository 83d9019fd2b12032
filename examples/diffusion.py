"""A U-Net of diffusers learns to take noise out of pictures: tensor parallel, each device has half of every block.

python examples/diffusion.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from jsonargparse import auto_cli
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy


class Diffusion(L.LightningModule):
    """Predicts the noise in noisy pictures; a batch is pictures (B, 1, 16, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.unet = UNet2DModel(
            sample_size=16,
            in_channels=1,
            out_channels=1,
            block_out_channels=(32, 64),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            layers_per_block=1,
            norm_num_groups=8,
        )
        self.noise = DDPMScheduler(num_train_timesteps=100)

    def error(self, pictures: Tensor) -> Tensor:
        """Mean squared error of the predicted noise, at random times."""
        times = torch.randint(100, (len(pictures),), device=pictures.device)
        noise = torch.randn_like(pictures)
        return F.mse_loss(self.unet(self.noise.add_noise(pictures, noise, times), times).sample, noise)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the error."""
        loss = self.error(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the error of other pictures."""
        self.log("val_loss", self.error(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def squares(num: int) -> Tensor:
    """White squares of 8 x 8 at random places on black, (num, 1, 16, 16)."""
    y, x = torch.randint(9, (2, num, 1, 1))
    places = torch.arange(16)
    rows = (places[:, None] >= y) & (places[:, None] < y + 8)
    columns = (places >= x) & (places < x + 8)
    return (2.0 * (rows & columns) - 1)[:, None]


def main(devices: int = 2, max_steps: int = 100, tensor_parallel_size: int = 2) -> None:
    """Train, and tell the loss before and after.

    Args:
        devices: Number of GPUs, or of processes where there are none.
        max_steps: Number of optimizer steps.
        tensor_parallel_size: Ranks that share each block's weights.
    """
    L.seed_everything(1)
    strategy = ThreeDStrategy(tensor_parallel_size=tensor_parallel_size)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=max_steps)
    model = Diffusion()
    training, validation = DataLoader(squares(4096), batch_size=16), DataLoader(squares(128), batch_size=16)
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, training)
    after = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        print(f"val_loss {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
