"""A record of the calls of one head: how they ended, step by step, and whether the next is to be lazy."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from lightning_3d.tensor.vocabulary.head_call import HeadCall, Outcome
from lightning_3d.tensor.vocabulary.lazy_tensor import lazy_logits
from lightning_3d.trace.refusals import user_frame

PATIENCE = 2
"""Calls in a row whose logits are read, after which they are made at once; one of many may, as to log an accuracy."""

FUSED = "fused with its cross entropy, without logits"
ELSEWHERE = (
    "its pipeline stage fuses it with its cross entropy, unless the step reads logits or waits for their gradient"
)


class HeadRecord:
    """The calls of one head, of the present step and what was seen in earlier ones."""

    def __init__(self) -> None:
        self._num_read: dict[bool, int] = {}  # with gradients or without -> calls in a row
        self._reasons: dict[bool, str] = {}
        self._calls: list[tuple[Outcome, weakref.ref[HeadCall]]] = []
        self.is_known = False
        """Whether a training step has run."""

    @property
    def is_read(self) -> bool:
        """Whether calls with gradients, or those without, make logits at once."""
        return self._num_read.get(torch.is_grad_enabled(), 0) >= PATIENCE

    @property
    def reason(self) -> str | None:
        """Why logits are made in training."""
        return self._reasons.get(True)

    def refuse(self, reason: str, *, has_grad: bool) -> None:
        """Note why calls make logits."""
        self._reasons[has_grad] = reason

    def lazily(self, call: HeadCall) -> Tensor:
        """The output of a call."""
        self._calls.append((call.outcome, weakref.ref(call)))
        return lazy_logits(call)

    def note_read(self, has_grad: bool, reader: str) -> None:
        """Note that the step reads logits, by the function of that name."""
        self.refuse(f"the step reads logits: {reader} at {user_frame()}", has_grad=has_grad)

    def end_step(self) -> None:
        """Count what the step's calls became."""
        for outcome, reference in self._calls:
            if (call := reference()) is not None:
                call.end()
            has_grad = outcome.has_grad
            self._num_read[has_grad] = self._num_read.get(has_grad, 0) + 1 if outcome.is_plain else 0
            self.is_known |= has_grad
            if not outcome.is_plain:
                self._reasons.pop(has_grad, None)
        self._calls.clear()

    def text(self, *, is_absent: bool) -> str:
        """The outcome in training, for people.

        Args:
            is_absent: Whether it is on another pipeline stage.
        """
        if self.reason is not None:
            return f"makes logits, as {self.reason}"
        if is_absent:
            return ELSEWHERE
        return FUSED if self.is_known else "the first training step shows whether it is fused with its loss"
