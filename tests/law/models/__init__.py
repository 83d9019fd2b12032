"""MODELS: what is trained, a row each.

A row has a `Job` of tests/parity.py (the model, its data, the size of the global batch) and what one has to know of the
model to train it anywhere: a learning rate for plain gradient descent, traits that rule out some layouts, and whether
another row stands for it in the cover.
"""

from __future__ import annotations

from tests.law.models import (
    blocks,
    by_hand,
    diffusion,
    flex,
    glue,
    heads,
    inline,
    keeping,
    losses,
    programs,
    replicas,
    stages,
    tensor,
    transformer_losses,
    transformers,
    weights,
)
from tests.law.models.row import Model

_ROOMS = (by_hand, transformers, losses, programs, blocks, stages, transformer_losses, glue)
_LATER = (inline, heads, diffusion, tensor, replicas, weights, keeping, flex)

WITHOUT_SEQUENCES = frozenset(
    {
        *("albert", "balanced", "bookkeeping", "carrying", "changed-arguments", "changing", "convnext"),
        *("convolutions", "deep-q", "diffusers-unet", "efficientnet", "few-steps", "formats", "frozen-stages"),
        *("graphs", "habits", "heat-equation", "kept-products", "kept-tables", "lora", "mixup"),
        *("mlp", "norms", "odd-blocks", "odd-parameters", "parameterless", "paths", "penalised"),
        *("penalties", "proximal-policy", "quantised", "reading", "recomputed-stages", "referring", "resnet"),
        *("reversible", "run-again", "segformer", "self-changing", "teachers", "teachers-elsewhere", "unet"),
    }
)
"""Models no block of which gets (batch, sequence, features), as images and vectors are none."""

MODELS: dict[str, Model] = {name: row for room in (*_ROOMS, *_LATER) for name, row in room.MODELS.items()}
