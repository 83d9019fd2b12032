"""Saying in a plan how the loss of a batch comes from those of its microbatches."""

from __future__ import annotations

_WHOLE = "computed once, on the whole batch, between all forwards and all backwards"
_TEXTS = {
    "auto": "found out at the first step, and told unless it is the mean over samples; if it couples samples, it is"
    f" {_WHOLE}",
    "mean": "the mean over samples of the microbatches' losses, as set",
    "sum": "the sum of the microbatches' losses, as set",
    "whole": f"{_WHOLE}, as set",
}
_COSTS = ", which holds the activations of all {} microbatches"


def loss_text(setting: str, num_microbatches: int) -> str:
    """A line for people.

    Args:
        setting: ``pipeline.loss``.
    """
    cost = _COSTS.format(num_microbatches) if _WHOLE in _TEXTS[setting] else ""
    return f"loss: {_TEXTS[setting]}{cost} (pipeline.loss={setting})"
