"""The states of all default generators: of torch on every device, of Python and of NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Go on from the same states afterwards, also after an exception, where Lightning's ``isolate_rng`` does not."""
    states = _collect_rng_states()
    try:
        yield
    finally:
        _set_rng_states(states)
