"""A Trainer that only trains, on CPU processes unless told otherwise."""

from __future__ import annotations

from typing import Any

import lightning as L


def quiet_trainer(
    strategy: Any, num_ranks: int, num_steps: int, *callbacks: L.Callback, accelerator: str = "cpu", **settings: Any
) -> L.Trainer:
    """Train for some steps, without logs, checkpoints, progress bar and summary."""
    return L.Trainer(
        accelerator=accelerator,
        devices=num_ranks,
        strategy=strategy,
        max_steps=num_steps,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
