"""Modules of `pytorch_lightning` train as those of `lightning.pytorch`."""

from __future__ import annotations

import importlib
import sys

import lightning.pytorch

import lightning_3d  # noqa: F401
from tests.scripts import start

PROGRAM = """
import sys
import {first}
import pytorch_lightning as pl
import lightning_3d
import torch
from pytorch_lightning.callbacks import Timer
from torch.utils.data import DataLoader, TensorDataset

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(accelerator="cpu", devices=1, strategy="3d", max_epochs=1, callbacks=[Timer()], **quiet)
trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=4))
print(f"{{trainer.global_step}} steps by {{type(trainer.strategy).__name__}}")
"""


def test_the_twin_trains() -> None:
    ended = start(["-c", PROGRAM.format(first="lightning_3d")], timeout=120)
    assert ended.returncode == 0, ended.output
    assert "2 steps by ThreeDStrategy" in ended.output


def test_a_twin_that_was_imported_before_is_refused() -> None:
    ended = start(["-c", PROGRAM.format(first="pytorch_lightning")], timeout=120)
    assert ended.returncode == 1
    assert 'ConfigError: strategy="3d" was given to a Trainer of pytorch_lightning, which was' in ended.output


def test_modules_of_the_twin_keep_their_own_names() -> None:
    twin = importlib.import_module("pytorch_lightning.callbacks.early_stopping")
    assert twin is sys.modules["lightning.pytorch.callbacks.early_stopping"]
    assert twin.__spec__ is not None
    assert twin.__spec__.name == twin.__name__ == "lightning.pytorch.callbacks.early_stopping"
    assert sys.modules["pytorch_lightning"] is lightning.pytorch
