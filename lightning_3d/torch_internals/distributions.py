"""The arguments of ``torch.distributions``, whose values are checked by default.

Torch has a setter of that default, but nothing public that tells it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributions import Distribution


@contextmanager
def arguments_unchecked() -> Iterator[None]:
    """Let distributions check no values inside, unless they are made with ``validate_args=True``."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
