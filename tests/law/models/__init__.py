"""MODELS: what is trained, a row each.

A row has a `Job` of tests/parity.py (the model, its data, the size of the global batch) and what one has to know of the
model to train it anywhere: a learning rate for plain gradient descent, traits that rule out some layouts, and whether
another row stands for it in the cover.
"""

from __future__ import annotations

from tests.law.models import blocks, by_hand, losses, odd_views, programs, stages, transformer_losses, transformers
from tests.law.models.row import Model

MODELS: dict[str, Model] = {
    **by_hand.MODELS,
    **transformers.MODELS,
    **losses.MODELS,
    **odd_views.MODELS,
    **programs.MODELS,
    **blocks.MODELS,
    **stages.MODELS,
    **transformer_losses.MODELS,
}
