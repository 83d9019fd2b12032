"""``Steps``: the user's steps on a parallel model, as Lightning calls them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor

from lightning_3d.pipeline.microbatches import detached_from_inference
from lightning_3d.run.context import RunContext
from lightning_3d.run.parallel.parallel_model import ParallelModel


class Steps:
    """Runs steps; every rank calls its methods.

    Args:
        number: Steps of any kind that this process has run before, for their random numbers.
    """

    def __init__(self, context: RunContext, parallel: ParallelModel, number: int) -> None:
        self._context, self._parallel = context, parallel
        self.number = number
        self.accumulating = False
        """Whether another backward follows before the optimizer's step."""
        self.is_running = False
        """Inside of a step method of the user's."""

    def train(self, batch: object, rest: Sequence[object]) -> Any:
        """Run ``training_step(batch, *rest)``; returns what it returns."""
        parallel = self._parallel
        with self._running(are_buffers_due=not self.accumulating), self._context.precision.train_step_context():
            batch = parallel.guard(batch)
            if parallel.budget is not None:
                parallel.budget.look_at(batch)
            return parallel.runner.train(batch, rest, number=self._seed(trains=True), accumulating=self.accumulating)

    def evaluate(
        self, name: str, precision: AbstractContextManager[None], batch: object, rest: Sequence[object]
    ) -> Any:
        """Run ``<name>(batch, *rest)`` without gradients; returns what it returns."""
        # DTensors do not survive inference mode.
        with precision, self._running(are_buffers_due=False), torch.inference_mode(False), torch.no_grad():
            batch = self._parallel.guard(detached_from_inference(batch))
            return self._parallel.runner.evaluate(name, batch, rest, number=self._seed(trains=False))

    def _seed(self, *, trains: bool) -> int:
        """A number from which the random numbers of this step follow.

        With ``samples_per_step`` it is the place of the batch in the epoch of all replicas, on any number of them.
        """
        config, mesh, fit = self._context.config, self._context.mesh, self._context.trainer.fit_loop
        if config.samples_per_step is None:
            return self.number
        number = fit.batch_idx if trains else self.number
        place = number * mesh.shape.size("samples") + mesh.dp_rank
        return (self._context.trainer.current_epoch << 32) + place if trains else ~place

    @contextmanager
    def _running(self, *, are_buffers_due: bool) -> Iterator[None]:
        """Around a step, after which buffers may be due to be shared."""
        parallel, rendezvous = self._parallel, self._context.rendezvous
        rendezvous.sync_point()
        self.number += 1
        parallel.zero.begin_forward()
        parallel.buffers.before_step(are_due_after=are_buffers_due)
        self.is_running = True
        try:
            with rendezvous.in_lockstep():
                yield
        finally:
            self.is_running = False
        num, seconds = parallel.compiling.take()
        if num:
            rank_zero_info(f"Compiling blocks took {seconds:.1f} s, for {num} kinds of calls.")

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Inside of it Lightning runs the backward of a loss."""
        parallel = self._parallel
        with parallel.runner.around_backward(loss, accumulating=self.accumulating):
            yield
        if not self._context.module.automatic_optimization:
            self._context.precision.after_manual_backward()
        if not self.accumulating:
            parallel.zero.wait_params()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Inside of it gradients of replicas are left apart, as another backward follows."""
        self.accumulating = True
        try:
            yield
        finally:
            self.accumulating = False
