"""One call of a head, whose logits are made when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.tensor.vocabulary.sharded_classes import ShardedClasses
from lightning_3d.torch_internals.autocast import as_autocast
from lightning_3d.torch_internals.dispatch import DisableTorchFunction, DisableTorchFunctionSubclass
from lightning_3d.torch_internals.tensors import storage_id, version_of

Compute = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Computes something of rows, and of the weight and bias of a head."""
Through = Callable[[Tensor, Compute], Tensor]
"""Computes something of rows where the weight and bias of a head are whole."""
OnRead = Callable[[str], None]
"""Called with the name of the function when logits are made in full."""

AT_END, AT_CALL = "the end of the step", "the end of a call without gradients"
"""In place of a function's name."""


@dataclass(slots=True)
class Outcome:
    """The end of a call of a head."""

    has_grad: bool
    is_plain: bool = False
    """Whether its logits went on as plain tensors, as somebody read them or waits for their gradient."""


class HeadCall:
    """One call of a head, whose logits are made at most once.

    Args:
        rows: What the head was given, ``[..., width]``; of sharded classes, it sums the gradients of all ranks. Or what
            it gave, ``[..., own classes]``, where it has run on shards.
        weight: ``[classes, width]``, of this rank's classes; None if it is whole in ``through`` alone, or used already.
        on_read: Called when they are made.
        classes: All classes, where a rank has a part of them.
        num_classes: The number over all ranks.
        through: Computes something where the weight is whole.
        aliases: Tensors of the weights' memory that have versions of their own, as those of which they are parts have.
    """

    def __init__(
        self,
        rows: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        on_read: OnRead = lambda reader: None,
        classes: ShardedClasses | None = None,
        *,
        num_classes: int,
        through: Through | None = None,
        aliases: Sequence[Tensor] = (),
    ) -> None:
        self.rows, self.weight, self.bias = (_as_trained_now(tensor) for tensor in (rows, weight, bias))
        self.classes, self._on_read, self._aliases = classes, on_read, aliases
        self.num_classes, self._through = num_classes, through
        self._state = self._present_state()
        device = rows.device.type
        is_cast = torch.is_autocast_enabled(device) and rows.dtype in (torch.float32, torch.float16, torch.bfloat16)
        self.dtype = torch.get_autocast_dtype(device) if is_cast else rows.dtype
        """The dtype of the logits."""
        self.outcome = Outcome(torch.is_grad_enabled())
        self.is_fused = False
        """Whether a loss was computed without the logits."""
        self.at_end: list[Callable[[], object]] = []
        """Make the lazy tensors that come of it, if somebody still refers to them."""

    @property
    def takes_others(self) -> bool:
        """Whether logits are made of what several ranks have."""
        return self.classes is not None or self._through is not None

    def run(self, rows: Tensor, compute: Compute) -> Tensor:
        """Compute something of rows with the weights."""
        if not self._is_unchanged:
            raise StepError(
                "The input or the weight of a head was changed in place after the head was called, and before its"
                " logits were read or their cross entropy was computed. Change it after that, or set"
                " activations.fused_loss='never'."
            )
        if self._through is not None:
            return self._through(rows, compute)
        with DisableTorchFunctionSubclass():
            return compute(rows, self.weight, self.bias)

    @property
    def _is_unchanged(self) -> bool:
        return bool(self._state == self._present_state())

    def _present_state(self) -> Any:
        with DisableTorchFunction():  # shards would answer with the version of their part
            changes = sum(version_of(alias) for alias in self._aliases)  # of new ones it is 0
        return changes, [None if tensor is None else _state(tensor) for tensor in (self.rows, self.weight, self.bias)]

    def end(self) -> None:
        """Make those that somebody still refers to, before the weights change, unless the step has changed them."""
        for make in self.at_end if self._is_unchanged else ():
            make()

    def logits(self, reader: str) -> Tensor:
        """All logits as the head makes them, for the function of that name."""
        self._on_read(reader)
        self.outcome.is_plain = True
        with DisableTorchFunctionSubclass():
            return self.run(self.rows, self._make)

    def own(self, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Logits of this rank's classes, of other tensors.

        Raises:
            StepError: the weight is absent.
        """
        if self._through is not None:
            raise StepError(
                "torch.func, or C++ code, read logits beneath torch's functions, and their gradient needs a weight that"
                " is gathered only while its head runs (zero.stage=3): set activations.fused_loss='never'."
            )
        return _linear(rows, weight, bias)

    def cut(self, gradient: Tensor) -> Tensor:
        """The part of the logits' gradient that is of this rank's classes."""
        return gradient if self.classes is None else self.classes.own(gradient)

    def _make(self, rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        own = _linear(rows, weight, bias)
        return own if self.classes is None else self.classes.gathered(own)


def _linear(rows: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return rows if weight is None else F.linear(rows, as_autocast(weight), bias)


def _as_trained_now(tensor: Any) -> Any:
    """The tensor, without gradients also if it is trained later, if it is not trained now."""
    return tensor if tensor is None or tensor.requires_grad else tensor.detach()


def _state(tensor: Tensor) -> tuple[int | None, int, bool]:
    """Differs where something has changed a tensor, or put another memory or requirement in its place."""
    version = None if tensor.is_inference() else version_of(tensor)
    return version, storage_id(tensor.untyped_storage()), tensor.requires_grad
