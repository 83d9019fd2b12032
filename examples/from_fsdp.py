"""A transformer that was trained by Lightning's FSDPStrategy; what was changed is marked by `# was:`.

python examples/from_fsdp.py
"""

from __future__ import annotations

import lightning as L
import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d import ThreeDStrategy  # was: from lightning.pytorch.strategies import FSDPStrategy


class Sorter(L.LightningModule):
    """Puts 16 digits in order; a batch is digits (B, 16) int64."""

    def __init__(self, width: int = 64, num_layers: int = 4) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(10, width), nn.Embedding(16, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(num_layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, digits: Tensor) -> Tensor:
        """Logits of the digit at each place, (B, 16, 10)."""
        x = self.digits(digits) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of a digit."""
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch.sort().values.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Log the same of other digits."""
        loss = F.cross_entropy(self(batch).flatten(0, 1), batch.sort().values.flatten())
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-3)  # was: the same


def main(devices: int = 2, max_steps: int = 100) -> None:
    """Train, and tell the loss before and after.

    Args:
        devices: Number of GPUs, or of processes where there are none.
        max_steps: Number of optimizer steps.
    """
    L.seed_everything(1)
    strategy = ThreeDStrategy(  # was: FSDPStrategy(
        zero={"stage": 3},  # was:     sharding_strategy="FULL_SHARD",
        #                     was:     auto_wrap_policy={nn.TransformerEncoderLayer},
        activations={  # was:          activation_checkpointing_policy={nn.TransformerEncoderLayer},
            "recompute": "full",
            "blocks": "type:TransformerEncoderLayer",
        },
    )
    trainer = L.Trainer(strategy=strategy, devices=devices, max_steps=max_steps)
    model = Sorter()
    training, validation = (DataLoader(torch.randint(10, (num, 16)), batch_size=32) for num in (8192, 256))
    before = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    trainer.fit(model, training)
    after = trainer.validate(model, validation, verbose=False)[0]["val_loss"]
    if trainer.is_global_zero:
        print(f"val_loss {before:.3f} -> {after:.3f}")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
