"""When gradients are reduced: in buckets during a backward, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.autograd import when_backward_ends
from lightning_3d.zero.buckets import Bucket
from lightning_3d.zero.shard import RankShard, plain


class GradientReducer:
    """Reduces the gradients of a list of buckets.

    A gradient that is taken in leaves its parameter; what was reduced is handed to `give`.

    Args:
        buckets: In the order in which their gradients are expected.
        give: Takes this rank's part of a reduced gradient.
        backward_ended: Called after a backward that was reduced.
    """

    def __init__(
        self, buckets: Sequence[Bucket], give: Callable[[RankShard, Tensor], None], backward_ended: Callable[[], None]
    ) -> None:
        self._backward_ended = backward_ended
        self._buckets, self._give = list(buckets), give
        self.is_on = True
        """Whether backwards reduce; else gradients accumulate in the parameters."""
        self._place: dict[nn.Parameter, tuple[Bucket, RankShard]] = {
            shard.parameter: (bucket, shard) for bucket in buckets for shard in bucket.shards
        }
        self._num_launched = 0
        self._ends = False  # whether the end of this backward is awaited
        self._hooks = [self._hook(parameter) for parameter in self._place]

    def _hook(self, parameter: nn.Parameter) -> RemovableHandle:
        is_trained = parameter.requires_grad
        handle: RemovableHandle = parameter.requires_grad_(True).register_post_accumulate_grad_hook(self._accumulated)
        parameter.requires_grad_(is_trained)  # it may be trained later
        return handle

    def remove(self) -> None:
        """Leave the parameters alone from now on."""
        for hook in self._hooks:
            hook.remove()

    def begin(self) -> None:
        """Before a step.

        Raises:
            StepError: the last backward was left by an exception, with gradients on their way.
        """
        if self._ends:
            raise StepError(
                "The last backward ended by an exception, and its gradients were being reduced over the data-parallel"
                " ranks: they are lost. An exception in a backward can't be skipped with several replicas; end the run"
                " and resume from a checkpoint."
            )

    @torch.no_grad()
    def _accumulated(self, parameter: Tensor) -> None:
        if not self.is_on:
            return
        if not self._ends:
            self._ends = True
            when_backward_ends(self._end)
        assert isinstance(parameter, nn.Parameter)
        if not self._place[parameter][0].is_launched:  # else it is used in several parts of one backward: see `flush`
            self._take(parameter)
        while self._num_launched < len(self._buckets) and self._buckets[self._num_launched].is_full:
            self._launch_next()

    def _take(self, parameter: nn.Parameter) -> None:
        bucket, shard = self._place[parameter]
        assert parameter.grad is not None
        bucket.fill(shard, plain(parameter.grad.detach()))
        parameter.grad = None

    def _launch_next(self) -> None:
        bucket = self._buckets[self._num_launched]
        if bucket.is_trained:
            bucket.launch()
        self._num_launched += 1

    @torch.no_grad()
    def _end(self) -> None:
        self.flush()
        self._backward_ended()

    @torch.no_grad()
    def flush(self) -> None:
        """Reduce all gradients that are there; every rank calls it."""
        late = self._flush()
        while late:  # gradients of another part of the same backward, to be reduced with what came before
            late = self._flush()

    def _flush(self) -> bool:
        while self._num_launched < len(self._buckets):
            for shard in self._buckets[self._num_launched].shards:
                if shard.parameter.grad is not None and shard.parameter.requires_grad:
                    self._take(shard.parameter)
            self._launch_next()
        self._num_launched, self._ends = 0, False
        late = False
        for bucket in self._buckets:
            if not bucket.is_launched:
                continue
            late |= any(shard.parameter.grad is not None for shard in bucket.shards if shard.parameter.requires_grad)
            for shard, gradient in bucket.collect():
                self._give(shard, gradient)
        return late
