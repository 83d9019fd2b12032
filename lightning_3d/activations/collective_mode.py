"""Collectives in the forward of a block, shown to the dispatch modes that keep or give results.

A mode sees operators. Of a collective behind ``torch.distributed`` these tell neither when its result is there, nor
whether somebody reads its operand again. Who makes one knows both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from torch import Tensor

from lightning_3d.torch_internals.dispatch import OperatorMode, dispatch_modes


class CollectiveMode(OperatorMode, ABC):
    """A dispatch mode that answers collectives, too."""

    @abstractmethod
    def on_collective(self, make: Callable[[], Tensor], used_up: Tensor | None) -> Tensor:
        """The result of a collective; the arguments are those of `collective`."""


def collective(make: Callable[[], Tensor], used_up: Tensor | None = None) -> Tensor:
    """Make a collective of a block's forward, unless its result is known.

    Args:
        make: Makes it, and returns when its result may be read; all ranks do or none does.
        used_up: An operand that nobody reads after it.
    """
    for mode in dispatch_modes():
        if isinstance(mode, CollectiveMode):
            make = partial(mode.on_collective, make, used_up)
    return make()
