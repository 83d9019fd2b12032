"""Calls of blocks outside of steps, with a pipeline: all ranks that share a block are to call it; they run it inline.

Each rank runs the whole of ``self(x)`` in a hook, with the same inputs, as it does under DDP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NoReturn

from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON, AnyCallable, BlockRunner
from lightning_3d.pipeline.inline.step import InlineStep
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves


class CallsBetweenSteps:
    """Runs calls of blocks on all ranks of a replica together.

    Args:
        ranks: Those that call together.
        around: Entered by each call, as by the forward of a step.
        has_backward: Whether a backward may come to what blocks give.
    """

    def __init__(
        self,
        inline: InlineStep,
        ranks: Sequence[int],
        met: Rendezvous,
        around: Callable[[], AbstractContextManager[None]],
        *,
        has_backward: bool,
    ) -> None:
        self._inline, self._ranks, self._rendezvous, self._around = inline, ranks, met, around
        self._has_backward = has_backward

    def __deepcopy__(self, memo: dict[int, object]) -> CallsBetweenSteps:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """A pickled block belongs to no ranks."""
        return type(None), ()

    def run(self, runner: BlockRunner, call: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        """Run a call of a block where its weights are; every rank of the replica calls it.

        Raises:
            StepError: another rank does something else.
            Exception: the call's own, on every rank.
        """
        if self._rendezvous.is_agreed:
            return call(*args, **kwargs)
        self._rendezvous.sync_check(self._ranks, f"a call of {runner.fqn}")
        with self._rendezvous.in_lockstep(), self._around():  # blocks inside of it
            output = self._inline.on_block(runner, call, args, kwargs)
        self._inline.weights.forget()
        for leaf in () if self._has_backward else tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(_refuse, runner.fqn))
        return output


def _refuse(fqn: str, gradient: Tensor) -> NoReturn:
    raise StepError(
        f"A backward came to {fqn}, which was called outside of a step, but with a pipeline gradients pass between"
        f" stages in training_step alone. Call it and run the backward on every rank {SUMMON}, or set"
        " pipeline.mode=inline."
    )
