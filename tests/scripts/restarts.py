"""Trains under torchrun and dies once: `torchrun ... tests/scripts/restarts.py FOLDER LAYOUT DEED RANK BATCH [CKPT]`.

Each start trains in a layout that fills the world size, and writes the losses of its batches to
`FOLDER/losses-{rank}.txt`, a line `step, world size, loss, time` each. On the first start this rank does the deed after
so many batches. What it is given as `ckpt_path`, if anything, is CKPT. Before each batch it waits PAUSE seconds, an
environment variable.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import ThreeDStrategy

BATCHES, EPOCHS = 6, 2
SAMPLES = 12
"""In each batch of all replicas."""
HEARTBEAT_TIMEOUT = 8


class Model(L.LightningModule):
    """A few layers that drop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 8), nn.Linear(8, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Dies(L.Callback):
    """Notes losses; the process of one rank ends after a batch, unless it has been started again."""

    def __init__(self, folder: Path, deed: str, rank: int, batch: int) -> None:
        self.folder, self.deed, self.rank, self.batch = folder, deed, rank, batch

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        number, loss = trainer.global_step, float(trainer.callback_metrics["loss"]).hex()
        with (self.folder / f"losses-{trainer.global_rank}.txt").open("a") as file:
            file.write(f"{number} {trainer.world_size} {loss} {time.time()}\n")
        time.sleep(float(os.environ.get("PAUSE", "0")))
        died = self.folder / "died"
        if number == self.batch and trainer.global_rank == self.rank and not died.exists():
            died.touch()
            if self.deed == "exits":
                os._exit(1)
            if self.deed == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.deed == "loses its agent":
                os.kill(os.getppid(), signal.SIGKILL)
            if self.deed == "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.deed == "has a full disk":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def main(folder: str, layout: str, deed: str, rank: str, batch: str, ckpt_path: str | None = None) -> None:
    directory, world_size = Path(folder), int(os.environ["WORLD_SIZE"])
    size = int(layout.removeprefix("pp "))  # the data-parallel size is "auto"
    replicas = world_size // size
    saves = ModelCheckpoint(directory, every_n_train_steps=1, save_last=True, save_top_k=1, filename="step")
    L.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(3)
    samples = [torch.randn(SAMPLES * BATCHES, size, generator=generator) for size in (8, 1)]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=world_size // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=ThreeDStrategy(pipeline_parallel_size=size, heartbeat_timeout=timedelta(seconds=HEARTBEAT_TIMEOUT)),
        max_epochs=EPOCHS,
        callbacks=[Dies(directory, deed, int(rank), int(batch)), saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(*samples), batch_size=SAMPLES // replicas, shuffle=True)
    trainer.fit(Model(), loader, ckpt_path=ckpt_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
