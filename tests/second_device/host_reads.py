"""Counting where steps make the host wait for the device: reads of tensors' data, and copies from one to the other."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lightning_3d
from tests.second_device.device import NAME

_PACKAGE = Path(lightning_3d.__file__).parent
_READS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim"}
"""Operators whose result the host has to know."""


class HostReads(TorchDispatchMode):
    """Counts reads and copies inside, by what they are and the file of this package that made them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = self._kind(func.overloadpacket.__name__, args, kwargs or {})
        if kind is not None and (where := place()) is not None:
            self.counts[kind, where] += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _kind(name: str, args: Any, kwargs: Any) -> str | None:
        first = next((value for value in args if isinstance(value, Tensor)), None)
        if first is None:
            return None
        on_device = first.device.type == NAME
        if name in _READS and on_device:
            return "read"
        if name in ("index", "index_put_") and on_device:
            is_mask = any(isinstance(i, Tensor) and i.dtype == torch.bool for i in args[1])
            return "read" if is_mask else None
        if name == "copy_":
            is_late = args[2:] == (True,) or kwargs.get("non_blocking", False)
            return _crossing(args[1].device, first.device, is_late and (on_device or first.is_pinned()))
        if name == "_to_copy" and kwargs.get("device") is not None:
            is_late = kwargs.get("non_blocking", False)  # the host gets it in pinned memory
            return _crossing(first.device, torch.device(kwargs["device"]), is_late)
        return None


def _crossing(source: torch.device, target: torch.device, is_late: bool) -> str | None:
    if is_late or source.type == target.type or "meta" in (source.type, target.type):
        return None
    return "to the host" if source.type == NAME else "to the device"


def place() -> str | None:
    """The innermost file of the package that is running; None in code of Lightning and of tests alone."""
    for frame in reversed(traceback.extract_stack()):
        path = Path(frame.filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.name}"
    return None


class StepReads(L.Callback):
    """Counts the reads of some training steps, after the first ones have planned and traced."""

    def __init__(self, first: int, last: int) -> None:
        self.reads, self._first, self._last = HostReads(), first, last

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._first:
            self.reads.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *rest: Any) -> None:
        if rest[-1] == self._last:
            self.reads.__exit__(None, None, None)

    def by_step(self) -> dict[str, float]:
        """Reads in a step, by kind and place."""
        steps = self._last - self._first + 1
        return {f"{kind}: {where}": number / steps for (kind, where), number in self.reads.counts.items()}
