"""A call of a block whose activations are offloaded, and the call whose backward comes after its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from weakref import ref

from torch import Tensor, nn

from lightning_3d.activations.offloaded_memory import OffloadedMemory
from lightning_3d.torch_internals.autograd import is_cast
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.tensors import base_of, storage_id


class OffloadedCall:
    """A call of a block. It lives as long as the graph keeps something of it.

    Args:
        forward: That it is a part of.
    """

    def __init__(self, block: nn.Module, forward: ForwardPass) -> None:
        own = [part_of(tensor) for tensor in (*block.parameters(), *block.buffers())]
        self._storages = {storage_id(tensor.untyped_storage()) for tensor in own}
        self._shapes = {tensor.shape for tensor in own}
        self._memory: list[ref[OffloadedMemory]] = []
        self._forward = forward
        self._before: Reference = nothing
        self._is_needed = False

    def has_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor is a weight or buffer, a view of one, or a copy that ``autocast`` made of one."""
        if storage_id(tensor.untyped_storage()) in self._storages:
            return True
        base = base_of(tensor)
        whole = tensor if base is None else base
        return isinstance(whole, nn.Parameter) or (is_cast(whole) and whole.shape in self._shapes)

    def add(self, memory: OffloadedMemory) -> None:
        """Note memory that its backward needs."""
        if not self._memory:
            self._before, self._forward.last = self._forward.last, refer_to(self)
        self._memory.append(ref(memory))

    def leave(self) -> None:
        """Let the memory of the device go."""
        for memory in self._alive():
            memory.leave()

    def fetch(self) -> None:
        """Begin to bring everything back, in the order in which the backward needs it."""
        for memory in reversed([*self._alive()]):
            memory.fetch()

    def need(self) -> None:
        """Tell that its backward runs: the next one's memory begins to come back, too."""
        if self._is_needed:
            return
        self._is_needed = True
        self.fetch()
        following = self._forward.following
        if (call := self._before() or (None if following is None else following.last())) is not None:
            call.fetch()

    def _alive(self) -> Iterator[OffloadedMemory]:
        return (memory for reference in self._memory if (memory := reference()) is not None)


class ForwardPass:
    """Calls of blocks whose backwards follow on each other in reverse: of a microbatch on a pipeline stage."""

    def __init__(self) -> None:
        self.last: Reference = nothing
        """The last call of which something is kept."""
        self.following: ForwardPass | None = None
        """That of the next microbatch on the stage, whose backward comes after."""


Reference = Callable[[], OffloadedCall | None]
"""Gives a call that lives still."""


def refer_to(call: OffloadedCall) -> Reference:
    """A reference to a call."""
    return ref(call)


def nothing() -> None:
    """A reference to no call."""
