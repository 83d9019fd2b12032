"""Collectives in the forward of a block, shown to selective recomputation, which saves and replays them.

A mode sees operators. Of a collective behind ``torch.distributed`` these tell neither when its result is there, nor
whether somebody reads its operand again. Who makes one knows both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from torch import Tensor

from lightning_3d.torch_internals.dispatch import KEEPS_PRODUCTS, OperatorMode, dispatch_modes, without_modes

T = TypeVar("T")


class CollectiveMode(OperatorMode, ABC):
    """A dispatch mode that answers collectives, too."""

    @abstractmethod
    def on_collective(self, make: Callable[[], T], donated: Tensor | None) -> T:
        """The result of a collective; the arguments are those of `collective`."""


def collective(make: Callable[[], T], donated: Tensor | None = None) -> T:
    """Make a collective of a block's forward, unless its result is known.

    Args:
        make: Makes it, and returns its result, a tensor or several, when that may be read; all ranks do or none does.
        donated: An operand that nobody reads after it.
    """
    for mode in dispatch_modes():
        if isinstance(mode, CollectiveMode):
            make = partial(mode.on_collective, make, donated)
    return make()


def is_kept() -> bool:
    """Whether the user's own selective checkpoint keeps what operators give: it must not be changed in place, however
    fresh it is.
    """
    return any(isinstance(mode, KEEPS_PRODUCTS) for mode in dispatch_modes())


def unseen_by_checkpoints() -> AbstractContextManager[object]:
    """Inside, the user's selective checkpoint sees no operators: it would keep buffers that a collective fills later,
    and it tells the calls of both runs by their numbers, so that it may not see what is made once.
    """
    return without_modes(KEEPS_PRODUCTS) if is_kept() else nullcontext()
