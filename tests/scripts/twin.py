"""Trains a module of `pytorch_lightning`, which is imported before or after lightning_3d: `python twin.py ORDER`."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def main(order: str) -> None:
    names = ["lightning_3d", "pytorch_lightning"] if order == "after" else ["pytorch_lightning", "lightning_3d"]
    modules = {name: importlib.import_module(name) for name in names}
    pl: Any = modules["pytorch_lightning"]

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss: Tensor = self.layers(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callbacks = importlib.import_module("pytorch_lightning.callbacks")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy="3d",
        max_epochs=1,
        callbacks=[callbacks.Timer()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
    print(f"{trainer.global_step} steps by {type(trainer.strategy).__name__}")


if __name__ == "__main__":
    main(sys.argv[1])
