"""Calls of blocks outside of steps, with a pipeline: the rank that has the block runs it, and all get what it gives.

So each rank runs the whole of ``self(x)`` in a hook, with the same inputs, as it does under DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON, Call
from lightning_3d.pipeline.inline.exchange import Exchange, Shown
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.torch_internals.pytree import tree_map_only


class StageCalls:
    """Runs calls of blocks outside of steps on all ranks of a replica together.

    Args:
        ranks: Those that call together.
        has_backward: Whether a backward may come to what blocks give.
    """

    def __init__(self, exchange: Exchange, ranks: Sequence[int], rendezvous: Rendezvous, *, has_backward: bool) -> None:
        self._exchange, self._ranks, self._met = exchange, ranks, rendezvous
        self._has_backward = has_backward

    def __deepcopy__(self, memo: dict[int, Any]) -> StageCalls:
        return self

    def __reduce__(self) -> Any:
        """A pickled block belongs to no ranks."""
        return _nothing, ()

    def run(self, fqn: str, home: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a block where its weights are; every rank of the replica calls it.

        Args:
            fqn: The block.
            home: Index on the pp axis of the rank that has it.

        Raises:
            StepError: another rank does something else.
            Exception: the call's own, on every rank.
        """
        if self._met.is_agreed:
            return call(*args, **kwargs)
        self._met.meet(self._ranks, f"a call of {fqn}")

        def run(shown: Shown, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, None]:
            with self._met.agreed():  # blocks inside of it
                return call(*args, **kwargs), None

        output, _ = self._exchange.run(fqn, home, run, args, kwargs)
        return output if self._has_backward else tree_map_only(Tensor, partial(_ends_here, fqn), output)


def _nothing() -> None:
    return None


class _Ends(torch.autograd.Function):
    """An output of which no backward follows."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, fqn: str) -> Tensor:
        ctx.fqn = fqn
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise StepError(
            f"A backward came to {ctx.fqn}, which was called outside of a step, but with a pipeline gradients pass"
            f" between stages in training_step alone. Call it and run the backward on every rank {SUMMON}, or set"
            " pipeline.mode=inline."
        )


def _ends_here(fqn: str, tensor: Tensor) -> Tensor:
    ended: Tensor = _Ends.apply(tensor, fqn) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return ended
