"""The dataloaders of the loop that a Trainer is about to run, and the hooks around a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_3d.torch_internals.pytree import tree_unflatten


@dataclass(frozen=True, kw_only=True)
class Loaders:
    """The dataloaders of a loop."""

    flat: Sequence[Any]
    is_sequential: bool
    """Whether the loop takes batches of one after the other; else each batch has one of each."""
    _spec: Any

    def structured(self, batches: Sequence[Any]) -> Any:
        """Batches of the loaders in the containers that the loaders came in."""
        return tree_unflatten(list(batches), self._spec)


def active_loaders(trainer: Trainer) -> Loaders | None:
    """The dataloaders of the loop that is about to run; None where it has none."""
    loop = trainer._active_loop
    assert loop is not None
    loop.setup_data()
    combined = loop._combined_loader
    if combined is None or not combined.flattened:
        return None
    return Loaders(flat=combined.flattened, is_sequential=combined._mode == "sequential", _spec=combined._spec)


def before_transfer(module: LightningModule, batch: Any) -> Any:
    """A batch as the user's ``on_before_batch_transfer`` leaves it."""
    return module._on_before_batch_transfer(batch, dataloader_idx=0)
