"""Whether a fit ends with the step that it is at."""

from __future__ import annotations

from lightning.pytorch import Trainer


def is_last_step(trainer: Trainer) -> bool:
    """Whether no step of training comes after this one, as far as the settings and callbacks of the Trainer say."""
    is_last_epoch = trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch + 1
    num_steps = trainer.max_steps
    return trainer.should_stop or 0 <= num_steps <= trainer.global_step or (is_last_epoch and trainer.is_last_batch)
