"""Saying in a plan how the loss of a batch comes from those of its microbatches."""

from __future__ import annotations

_WHOLE = "computed once, on the whole batch, between all forwards and all backwards"
_AS_ONE = "that of the whole batch, as on one device"
_TEXTS = {
    "auto": f"{_AS_ONE}; the first step shows how it comes from those of the microbatches. If it couples samples, as a"
    f" contrastive loss does, it is {_WHOLE}",
    "mean": "the mean over samples of the microbatches' losses, as set",
    "sum": "the sum of the microbatches' losses, as set",
    "whole": f"{_WHOLE}, as set",
}
_COSTS = ", which holds the activations of all {} microbatches"


def loss_in_short(setting: str) -> str:
    """The loss of a plan in half a line: what it is, without how it is computed.

    Args:
        setting: ``pipeline.loss``.
    """
    return f"{_AS_ONE if setting in ('auto', 'whole') else _TEXTS[setting]} (pipeline.loss={setting})"


def loss_text(setting: str, num_microbatches: int) -> str:
    """A line for people.

    Args:
        setting: ``pipeline.loss``.
    """
    cost = _COSTS.format(num_microbatches) if _WHOLE in _TEXTS[setting] else ""
    return f"loss: {_TEXTS[setting]}{cost} (pipeline.loss={setting})"
