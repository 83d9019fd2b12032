"""State of a block before a forward, for the recomputation of that forward: attributes, buffers, generators.

Attributes are kept as references, as code around the block may set others before the backward: a rate of dropout, an
adapter, weights of a functional call. The data of small tensors always are, as torch does not count every change of
them (of running statistics, through ``tensor.data``); of a large one that the forward changes; and always of one that
the first forward changed without torch counting it (codebooks of vector quantisation). What can't be put back is
refused: weights that a forward changes, unless it does so once and for all, as clamping does, and large buffers that
other code changes in place before the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.activations.registries import Registries
from lightning_3d.distributed.generator_states import generators_of, set_state, state_of, states_kept
from lightning_3d.distributed.rng import Generators, RandomStates
from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import Snapshot
from lightning_3d.torch_internals.modules import BUFFERS, TORCH_ATTRIBUTES, buffers_of, parameters_of
from lightning_3d.torch_internals.tensors import storage_of, version_of

_SMALL = 2**16
"""Bytes of a tensor up to which its data are always kept."""

_IGNORED = TORCH_ATTRIBUTES - {BUFFERS, "training"}
"""Parameters, modules and hooks: see `Registries`."""


class StateBefore:
    """The state of a block before one forward.

    Args:
        fqn: Name of the block.
        is_kept: Whether the data of a tensor are kept always.
    """

    def __init__(
        self, fqn: str, modules: Sequence[nn.Module], generators: Generators, is_kept: Callable[[Tensor], bool]
    ) -> None:
        self._fqn, self._modules, self._generators, self._is_kept = fqn, modules, generators, is_kept
        self._data = self._data_now()
        self._snapshot: Snapshot | None = None  # until the forward ends, in which a backward may run
        self._registries = Registries(modules)
        self._drawn_from: RandomStates | None = None
        self._of_modules = [(generator, state_of(generator)) for generator in generators_of(modules)]
        self.changed_weights: Sequence[Tensor] = ()
        """The weights that the forward changed."""
        self.left_alone: Sequence[tuple[Tensor, int]] = ()
        """Large buffers that the forward did not change, whose data are not kept; with their versions."""

    def _data_now(self) -> list[tuple[Tensor, Tensor]]:
        return [(tensor, tensor.detach().clone()) for tensor in _tensors(self._modules) if self._is_kept(tensor)]

    def keep_data(self, tensor: Tensor, data: Tensor) -> None:
        """Keep data that a tensor had."""
        self._data.append((tensor, data))

    def keep(self, snapshot: Snapshot, states: RandomStates) -> None:
        """Keep what was there before the forward that ends now."""
        snapshot.leave_unchanged()
        self._snapshot = snapshot
        if not self._generators.are_at(states):
            self._drawn_from = states

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have this state inside, and that of now afterwards.

        Raises:
            StepError: something changed that can't be put back.
        """
        for tensor, version in self.left_alone:
            if version_of(tensor) != version:
                raise StepError(
                    f"{self._fqn} is computed again in its backward, but a buffer of shape {tuple(tensor.shape)}, which"
                    " its forward left alone, was changed in place since. Change it after the backward, or leave the"
                    " block out of activations.blocks."
                )
        now = self._data_now()
        still_held = {id(tensor) for tensor, _ in now}
        now += [(tensor, tensor.detach().clone()) for tensor, _ in self._data if id(tensor) not in still_held]
        with (
            self._attributes_back(),
            self._registries.back(),
            self._numbers_back(),
            self._same_weights(),
        ):
            _put_data(self._data)
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
    def _same_weights(self) -> Iterator[None]:
        before = [(weight, weight.detach().clone()) for weight in self.changed_weights]
        try:
            yield
        finally:  # also where torch ends it early
            changed = [weight for weight, values in before if not torch.equal(weight, values)]
            _put_data(before)
            if changed:
                raise StepError(
                    f"{self._fqn} changed a weight of its own of shape {tuple(changed[0].shape)} in place in its"
                    " forward, so that it can't be computed again. Change it in on_train_batch_end, or leave the block"
                    " out of activations.blocks."
                )

    @contextmanager
    def _numbers_back(self) -> Iterator[None]:
        with states_kept(generator for generator, _ in self._of_modules):
            for generator, state in self._of_modules:
                set_state(generator, state)
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


def _weights(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (weight for weight in parameters_of(module).values() if type(weight) is nn.Parameter)


def _put_data(data: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Put data back, by ``tensor.data``: for autograd, which may have saved the tensor, nothing changes in the end."""
    for tensor, values in data:
        tensor.data.copy_(values)


def _differs(tensor: Tensor, snapshot: Snapshot) -> bool:
    if not snapshot.has_data_of(tensor) or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return not torch.equal(snapshot.data_of(tensor), tensor)


class BlockState:
    """The state of a block.

    Args:
        fqn: Name of the block.
        generators: Those that it may draw from.
    """

    def __init__(self, fqn: str, modules: Sequence[nn.Module], generators: Generators) -> None:
        self._fqn, self._modules, self._generators = fqn, modules, generators
        self._changed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # large tensor -> by the first forward
        self._uncounted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # as well, where torch did not count it

    @contextmanager
    def before(self) -> Iterator[StateBefore]:
        """Keep the state for the recomputation of the forward that runs inside.

        Yields:
            The state, filled at the end.

        Raises:
            StepError: the forward changed a large tensor that its first call left alone.
        """
        state = StateBefore(self._fqn, self._modules, self._generators, self._is_kept)
        snapshot = Snapshot(self._modules, ignored=_IGNORED, with_data=self._is_copied)
        states = self._generators.states()
        large = [(tensor, version_of(tensor)) for tensor in _tensors(self._modules) if tensor.nbytes > _SMALL]
        weights = [(weight, version_of(weight)) for weight in _weights(self._modules)]
        yield state
        state.changed_weights = [weight for weight, version in weights if version_of(weight) != version]
        for tensor, version in large:
            is_changed = version_of(tensor) != version
            if is_changed and not self._is_copied(tensor):
                raise StepError(
                    f"{self._fqn} changed a buffer of shape {tuple(tensor.shape)} in place, which its first training"
                    " step left alone, so that its forward can't be computed again. Leave the block out of"
                    " activations.blocks."
                )
            if not is_changed and tensor not in self._changed and _differs(tensor, snapshot):
                self._uncounted[tensor] = True
                state.keep_data(tensor, snapshot.data_of(tensor))
            self._changed[tensor] = is_changed or self._changed.get(tensor, False)
        state.left_alone = [
            (tensor, version) for tensor, version in large if not self._changed[tensor] and not self._is_kept(tensor)
        ]
        state.keep(snapshot, states)

    def storages(self) -> Set[int]:
        """The memory of the buffers and other tensors that are put back for a recomputation."""
        tensors = _tensors(self._modules)
        return {storage for tensor in tensors if (storage := storage_of(tensor)) is not None}

    def _is_kept(self, tensor: Tensor) -> bool:
        return tensor.nbytes <= _SMALL or tensor in self._uncounted

    def _is_copied(self, tensor: Tensor) -> bool:
        return tensor.nbytes > _SMALL and bool(self._changed.get(tensor, True))
