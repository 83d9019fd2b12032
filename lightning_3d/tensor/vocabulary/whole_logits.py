"""Logits of any kind as plain tensors."""

from __future__ import annotations

from typing import Any

from lightning_3d.tensor.vocabulary.lazy_logits import made
from lightning_3d.tensor.vocabulary.sharded_output import plain


def whole(leaf: Any) -> Any:
    """The values of logits that are not there yet, or sharded over the vocabulary; anything else as it is."""
    return plain(made(leaf))
