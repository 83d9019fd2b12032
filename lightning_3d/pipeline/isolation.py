"""Running the user's step to study it, on this rank alone and without anything that stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.torch_internals.lightning_helpers import random_states_kept


@contextmanager
def isolated(effects: StepEffects) -> Iterator[None]:
    """Study steps inside.

    Args:
        effects: Take what the steps do beside their loss; they are not applied.
    """
    with random_states_kept(), effects.begin(0):
        yield
