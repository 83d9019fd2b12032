"""Running the user's step to study it, on this rank alone and without anything that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.torch_internals.lightning_helpers import random_states_kept
from lightning_3d.torch_internals.modules import attributes_replaced


@contextmanager
def isolated(module: LightningModule, effects: StepEffects) -> Iterator[None]:
    """Study steps of a module inside.

    Args:
        effects: Take what the steps do beside their loss; they are not applied.
    """
    alone = attributes_replaced(module, {"all_gather": _refuse})
    with random_states_kept(), alone, effects.begin(0):
        yield


def _refuse(*args: Any, **kwargs: Any) -> None:
    """In place of ``self.all_gather``: other replicas do not run the step once more."""
    raise StepError("a step that communicates can't be studied")
