"""The axis of a proof, whose ranks fail together.

What one rank runs into alone (memory, a kernel that it lacks) would leave the others in a collective that it never
makes. Here ranks first tell each other, by way of their hosts, which collective is next:

    rank 0    all-reduce of (4, 8)   all-reduce of (4, 8)   |  fails: "other ranks stop here"
    rank 1    all-reduce of (4, 8)   OutOfMemoryError       |  fails
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import PlanError
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.placement import Shard, full_shape
from lightning_3d.torch_internals.capture import is_captured

T = TypeVar("T")

_FAILED, _ENDED = -1, -2
"""In place of the number of the next collective."""


class ProofFailed(PlanError):
    """An error that a rank ran into in a proof, raised on all ranks."""


class _OthersStop(BaseException):
    """Others have failed, ended or come to another collective. No ``Exception``, so that no user code catches it."""


class ProofAxis(MeshAxis):
    """A `MeshAxis` whose collectives raise on every rank where not all ranks make the same."""

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Collective: every rank enters and leaves.

        Raises:
            ProofFailed: on every rank, if any of them failed inside.
        """
        error: str | None = None
        try:
            try:
                yield
            except Exception as failure:  # whatever goes wrong, also in the dense block
                error = f"{type(failure).__name__}: {failure}"
            self._sync_check(_ENDED if error is None else _FAILED)
        except _OthersStop as others:
            error = error or str(others)
        else:
            if error is None:
                return
        errors: list[str | None] = [None] * self.size
        dist.all_gather_object(errors, error, self.mesh.get_group())
        own = [text for text in errors if text is not None and not text.startswith(_STOPS)] or [_STOPS]
        raise ProofFailed(own[0])

    @contextmanager
    def inside(self, context: AbstractContextManager[T]) -> Iterator[T]:
        """Collective: a context that is entered and left by all ranks or by none.

        Raises:
            ProofFailed: on every rank, if any of them failed to enter or to leave it.
        """
        with ExitStack() as entered:
            with self.failing_together():
                value = entered.enter_context(context)
            yield value
            with self.failing_together():
                entered.close()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.sync_check("all-reduce", tensor)
        return super().all_reduce(tensor)

    def all_gather(self, local: Tensor, at: Shard) -> Tensor:
        self.sync_check(f"all-gather {at}", local, at)
        return super().all_gather(local, at)

    def reduce_scatter(self, tensor: Tensor, at: Shard) -> Tensor:
        self.sync_check(f"reduce-scatter {at}", tensor)
        return super().reduce_scatter(tensor, at)

    def all_to_all(self, local: Tensor, source: Shard, target: Shard) -> Tensor:
        self.sync_check(f"all-to-all {source} {target}", local, source)
        return super().all_to_all(local, source, target)

    def of_first_rank(self, tensor: Tensor) -> Tensor:
        self.sync_check("broadcast", tensor)
        return super().of_first_rank(tensor)

    def sync_check(self, what: str, tensor: Tensor | None = None, at: Shard | None = None) -> None:
        """Go on if all ranks do the same next; compiled code, which is made for all of them, is not asked.

        Args:
            at: How the tensor is cut; None if it is whole.
        """
        if tensor is None or not is_captured(tensor):
            shape = () if tensor is None else tensor.shape if at is None else full_shape(tensor.shape, at, self.size)
            described = what if tensor is None else f"{what} {tuple(shape)} {tensor.dtype}"
            self._sync_check(zlib.crc32(described.encode()))

    def _sync_check(self, number: int) -> None:
        if len(set(gather_numbers(number, self.mesh.get_group()))) > 1:
            raise _OthersStop(_STOPS)


_STOPS = "the ranks of the axis do not make the same collectives"
