"""State of a block before a forward, for the recomputation of that forward: attributes, buffers, generators.

Most forwards change no attribute, and then nothing of it is kept. The data of small tensors always are, as torch does
not count every change of them (of running statistics, through ``tensor.data``); of a large one that they change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.distributed.rng import Generators, RandomStates
from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import Snapshot
from lightning_3d.torch_internals.modules import BUFFERS, TORCH_ATTRIBUTES, buffers_of
from lightning_3d.torch_internals.tensors import version_of

_SMALL = 2**16
"""Bytes of a tensor up to which its data are always kept."""

_IGNORED = TORCH_ATTRIBUTES - {BUFFERS, "training"}
"""Parameters, which ZeRO gathers and frees; modules; hooks."""


class StateBefore:
    """The state of a block before one forward."""

    def __init__(self, modules: Sequence[nn.Module], generators: Generators) -> None:
        self._modules, self._generators = modules, generators
        self._small = _data_of_small(modules)
        self._snapshot: Snapshot | None = None
        self._drawn_from: RandomStates | None = None

    def keep(self, snapshot: Snapshot, states: RandomStates) -> None:
        """Keep what the forward that ends now changed."""
        if snapshot.differs():
            snapshot.leave_unchanged()
            self._snapshot = snapshot
        if not self._generators.are_at(states):
            self._drawn_from = states

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have this state inside, and that of now afterwards."""
        now = _data_of_small(self._modules)
        with self._attributes_back(), self._numbers_back():
            _put_data(self._small)
            try:
                yield
            finally:
                _put_data(now)

    @contextmanager
    def _attributes_back(self) -> Iterator[None]:
        if self._snapshot is None:
            yield
            return
        now = Snapshot(self._modules, ignored=_IGNORED, with_data=self._snapshot.has_data_of)
        self._snapshot.restore()
        try:
            yield
        finally:
            now.restore()

    @contextmanager
    def _numbers_back(self) -> Iterator[None]:
        if self._drawn_from is None:
            yield
            return
        with self._generators.preserved():
            self._generators.restore(self._drawn_from)
            yield


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The buffers, and the plain tensors in attributes."""
    for module in modules:
        for tensor in (*buffers_of(module).values(), *vars(module).values()):
            if type(tensor) is Tensor and not tensor.is_inference():
                yield tensor


def _data_of_small(modules: Iterable[nn.Module]) -> list[tuple[Tensor, Tensor]]:
    return [(t, t.detach().clone()) for t in _tensors(modules) if t.nbytes <= _SMALL]


def _put_data(data: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Put data back, by ``tensor.data``: for autograd, which may have saved the tensor, nothing changes in the end."""
    for tensor, values in data:
        tensor.data.copy_(values)


class BlockState:
    """The state of a block.

    Args:
        fqn: Name of the block.
        generators: Those that it may draw from.
    """

    def __init__(self, fqn: str, modules: Sequence[nn.Module], generators: Generators) -> None:
        self._fqn, self._modules, self._generators = fqn, modules, generators
        self._changed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # large tensor -> by the first forward

    @contextmanager
    def before(self) -> Iterator[StateBefore]:
        """Keep the state for the recomputation of the forward that runs inside.

        Yields:
            The state, filled at the end.

        Raises:
            StepError: the forward changed a large tensor that its first call left alone.
        """
        state = StateBefore(self._modules, self._generators)
        snapshot = Snapshot(self._modules, ignored=_IGNORED, with_data=self._is_copied)
        states = self._generators.states()
        large = [(tensor, version_of(tensor)) for tensor in _tensors(self._modules) if tensor.nbytes > _SMALL]
        yield state
        for tensor, version in large:
            is_changed = version_of(tensor) != version
            if is_changed and not self._is_copied(tensor):
                raise StepError(
                    f"{self._fqn} changed a buffer of shape {tuple(tensor.shape)} in place, which its first training"
                    " step left alone, so that its forward can't be computed again. Leave the block out of"
                    " activations.blocks."
                )
            self._changed[tensor] = is_changed or self._changed.get(tensor, False)
        state.keep(snapshot, states)

    def _is_copied(self, tensor: Tensor) -> bool:
        return tensor.nbytes > _SMALL and bool(self._changed.get(tensor, True))
