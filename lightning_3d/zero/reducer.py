"""When gradients are reduced: in buckets during a backward, in one order on all ranks.

A reentrant checkpoint runs a backward inside of the backward, and a parameter may get a part of its gradient in each.
Such parts, and from then on all gradients, wait in the parameters until the outer backward has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.autograd import current_backward, when_backward_ends
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.zero.buckets import Bucket
from lightning_3d.zero.shard import RankShard


class GradientReducer:
    """Reduces the gradients of a list of buckets.

    A gradient that is taken in leaves its parameter; what was reduced is handed to `give`.

    Args:
        buckets: In the order in which their gradients are expected.
        give: Takes this rank's part of a reduced gradient.
        backward_ended: Called after a backward that was reduced to its end, which `sync_at_backward_end` asks for.
    """

    def __init__(
        self, buckets: Sequence[Bucket], give: Callable[[RankShard, Tensor], None], backward_ended: Callable[[], None]
    ) -> None:
        self._buckets, self._give, self._backward_ended = list(buckets), give, backward_ended
        self.is_on = False
        """Whether backwards reduce, as those of steps; else gradients accumulate in the parameters."""
        self.sync_at_backward_end = True
        """Whether the end of a backward reduces what is left and waits for all; else `launch_rest` and `collect` do."""
        self._is_late = False  # gradients have accumulated since the last reduction
        self._num_launched = 0
        self._backward: int | None = None  # whose gradients are taken in
        self._is_reentrant = False
        self._hooks = [self._hook(bucket, index) for bucket in self._buckets for index in range(len(bucket.parameters))]

    def _hook(self, bucket: Bucket, index: int) -> RemovableHandle:
        parameter = bucket.parameters[index]
        is_trained = parameter.requires_grad
        hook = partial(self._accumulated, bucket, index)
        handle: RemovableHandle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(is_trained)  # it may be trained later
        return handle

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    @property
    def is_launched(self) -> bool:
        """Whether `collect` has something to wait for."""
        return self._num_launched > 0

    def begin(self) -> None:
        """Before a step.

        Raises:
            StepError: the last backward was left by an exception, with gradients on their way.
        """
        self._backward, self._is_late = None, False
        if any(bucket.has_begun for bucket in self._buckets):
            raise StepError(
                "The last backward ended by an exception, and its gradients were being reduced over the data-parallel"
                " ranks: they are lost. An exception in a backward can't be skipped with several replicas; end the run"
                " and resume from a checkpoint."
            )

    def begin_backward(self) -> None:
        """In a hook of a backward, before its gradients come."""
        if self.is_on and self._backward is None:
            self._backward = current_backward()
            if self.sync_at_backward_end:
                when_backward_ends(self._end)

    def _accumulated(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        if not self.is_on or parameter.grad is None:  # as behind a custom function that gives no gradient
            self._is_late |= not self.is_on
            return
        if self._backward is None:
            self.begin_backward()
        elif not self._is_reentrant:
            self._is_reentrant = current_backward() != self._backward
        if self._is_reentrant:
            return
        self._take(bucket, index)
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].is_full:
            self._launch_next()

    def _take(self, bucket: Bucket, index: int) -> None:
        parameter = bucket.parameters[index]
        assert parameter.grad is not None
        bucket.fill(index, part_of(parameter.grad).detach())
        parameter.grad = None

    def _launch_next(self) -> None:
        bucket = self._buckets[self._num_launched]
        if bucket.is_trained:
            bucket.launch()
        self._num_launched += 1

    def _end(self) -> None:
        self.flush()
        self._backward_ended()

    def flush(self) -> None:
        """Reduce all gradients that are there; every rank calls it."""
        self.launch_rest()
        self.collect()

    def flush_late(self) -> None:
        """Reduce gradients of backwards that came while this was off and since the last step began, if there are some.

        Those that were reduced before are alike on all ranks, and their mean is what they are.
        """
        if self._is_late:
            self.flush()

    @torch.no_grad()
    def launch_rest(self) -> None:
        """Begin to reduce all gradients that are there; every rank calls it."""
        while self._num_launched < len(self._buckets):
            bucket = self._buckets[self._num_launched]
            for index, parameter in enumerate(bucket.parameters):
                if parameter.grad is not None and parameter.requires_grad:
                    self._take(bucket, index)
            self._launch_next()
        self._backward, self._is_late = None, False

    @torch.no_grad()
    def collect(self) -> None:
        """Wait for what `launch_rest` has completed, and hand it over."""
        self._num_launched, is_late = 0, False
        for bucket in self._buckets:
            if bucket.is_launched:
                is_late |= any(p.grad is not None and p.requires_grad for p in bucket.parameters)
                for shard, gradient in bucket.collect():
                    self._give(shard, gradient)
        if is_late:  # of a reentrant checkpoint, after the bucket was launched; to be added to what came before
            self.flush()
