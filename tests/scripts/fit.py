"""Trains a small GPT on 2 ranks: `python tests/scripts/fit.py RESULT [CONFIG OVERRIDE ...]`, or under torchrun.

Without a config the strategy is `"3d"`, known by the mere import of lightning_3d. Writes what it saw to `RESULT`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import lightning as L

import lightning_3d
from tests.models import TinyGPT, tokens, training_loader

STEPS = 3
GLOBAL_BATCH_SIZE = 8
SEED = 1


class Losses(L.Callback):
    """Collects the logged loss of every batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.values.append(float(trainer.callback_metrics["loss_step"]))


def main(result: str, config: str | None = None, *overrides: str) -> None:
    strategy = "3d" if config is None else lightning_3d.ThreeDStrategy.from_config(config, overrides=overrides)
    losses = Losses()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        callbacks=[losses],
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    L.seed_everything(SEED)
    # Each replica draws its own part of the global batch.
    replicas = 2 if config is None else 1
    samples = tokens(STEPS * GLOBAL_BATCH_SIZE)
    data = training_loader(samples, global_batch_size=GLOBAL_BATCH_SIZE, data_parallel_size=replicas, seed=SEED)
    trainer.fit(TinyGPT(), data)
    assert isinstance(trainer.strategy, lightning_3d.ThreeDStrategy)
    reports = trainer.strategy.report()
    if trainer.is_global_zero:
        shape = trainer.strategy.mesh.shape
        seen = {
            "losses": losses.values,
            "sizes": {"pp": shape.pp, "dp": shape.dp, "tp": shape.tp},
            "zero": trainer.strategy.config.zero.stage,
            "environment": type(trainer.strategy.cluster_environment).__name__,
            "parameters": [report.num_parameters for report in reports],
            "optimizer_state": [report.num_optimizer_elements for report in reports],
        }
        Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
