"""Optimizers that step others, as Lookahead does one, and a chain several: each may hold states of its parameters."""

from __future__ import annotations

from torch.optim import Optimizer


def with_wrapped(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, and those in its attributes, or in lists, tuples and dicts there, at any depth."""
    found = [optimizer]
    for one in found:
        for name, value in vars(one).items():
            held = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
            if name not in ("state", "param_groups"):
                found += [other for other in held if isinstance(other, Optimizer) and other not in found]
    return found
