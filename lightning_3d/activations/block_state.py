"""State of a block before a forward, for the recomputation of that forward: attributes, buffers, generators, settings.

Attributes are kept as references, as code around the block may set others before the backward: a rate of dropout, a
cache. The data of small tensors and of running statistics always are, as torch does not count every change of them
(``tensor.data``). Refused are forwards that change weights or large tensors in place, large tensors that other code
changes before the backward, and weights and modules that others replace by then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from operator import is_

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_3d.distributed.generator_states import generators_of, set_state, state_of, states_kept
from lightning_3d.distributed.rng import Generators, RandomStates
from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import Snapshot
from lightning_3d.torch_internals.modules import (
    BUFFERS,
    TORCH_ATTRIBUTES,
    RunningNorm,
    buffers_of,
    children_of,
    parameters_of,
)
from lightning_3d.torch_internals.tensors import storage_of, version_of

_SMALL = 2**16
"""Bytes of a tensor up to which its data are kept."""

_IGNORED = TORCH_ATTRIBUTES - {BUFFERS, "training"}
"""Parameters, modules and hooks."""

_KERNELS = {
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}
"""Kernels of attention, which keep different tensors -> whether it may choose them."""


class StateBefore:
    """The state of a block before one forward.

    Args:
        fqn: Name of the block.
        generators: Those that it may draw from.
    """

    def __init__(self, fqn: str, modules: Sequence[nn.Module], generators: Generators) -> None:
        self._fqn, self._modules, self._generators = fqn, modules, generators
        norms = (module for module in modules if isinstance(module, RunningNorm))
        statistics = {id(buffer) for norm in norms for buffer in buffers_of(norm).values()}

        def is_kept(tensor: Tensor) -> bool:
            return tensor.nbytes <= _SMALL or id(tensor) in statistics

        self._snapshot = Snapshot(modules, ignored=_IGNORED, with_data=is_kept)
        self._large = [(tensor, version_of(tensor)) for tensor in _tensors(modules) if not is_kept(tensor)]
        self._structure = _structure(modules)
        self._drawn_from: RandomStates | None = generators.states()
        self._of_modules = [(generator, state_of(generator)) for generator in generators_of(modules)]
        self._dtype = torch.get_default_dtype()
        self._kernels = [kernel for kernel, is_enabled in _KERNELS.items() if is_enabled()]  # type: ignore[no-untyped-call]  # torch 2.13

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run the forward inside.

        Raises:
            StepError: it changed a weight or a large tensor in place.
        """
        weights = [(weight, version_of(weight)) for weight in _weights(self._modules)]
        yield
        for tensor in _changed((*weights, *self._large)):
            raise StepError(
                f"{self._fqn} changed a weight or a large buffer of its own of shape {tuple(tensor.shape)} in place in"
                " its forward, so that it can't be computed again. Change it in on_train_batch_end, or leave the block"
                " out of activations.blocks."
            )
        if self._drawn_from is not None and self._generators.are_at(self._drawn_from):
            self._drawn_from = None

    @contextmanager
    def back(self) -> Iterator[None]:
        """Have this state inside, and that of now afterwards.

        Raises:
            StepError: something changed that can't be put back.
        """
        self._check()
        now = Snapshot(self._modules, ignored=_IGNORED, with_data=self._snapshot.has_data_of)
        with ExitStack() as undone:
            undone.enter_context(sdpa_kernel(self._kernels))
            undone.callback(torch.set_default_dtype, torch.get_default_dtype())
            undone.enter_context(states_kept(generator for generator, _ in self._of_modules))
            if self._drawn_from is not None:
                undone.enter_context(self._generators.preserved())
                self._generators.restore(self._drawn_from)
            for generator, state in self._of_modules:
                set_state(generator, state)
            torch.set_default_dtype(self._dtype)
            undone.callback(now.restore, unseen=True)
            self._snapshot.restore(unseen=True)
            yield

    def _check(self) -> None:
        for tensor in _changed(self._large):
            raise StepError(
                f"{self._fqn} is computed again in its backward, but a buffer of shape {tuple(tensor.shape)}, which its"
                " forward left alone, was changed in place since. Change it after the backward, or leave the block out"
                " of activations.blocks."
            )
        now = _structure(self._modules)
        if len(now) != len(self._structure) or not all(map(is_, now, self._structure)):
            raise StepError(
                f"{self._fqn} is computed again in its backward, but a parameter or module in it was replaced since its"
                " forward. Replace it after the backward, or leave the block out of activations.blocks."
            )


def _structure(modules: Sequence[nn.Module]) -> list[object]:
    """The modules and parameters in them; FSDP2 replaces parameters as it gathers and frees them."""
    found: list[object] = [child for module in modules for child in children_of(module).values()]
    if not any(isinstance(module, FSDPModule) for module in modules):
        found += [parameter for module in modules for parameter in parameters_of(module).values()]
    return found


def _tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """The buffers, and the plain tensors in attributes."""
    for module in modules:
        for tensor in (*buffers_of(module).values(), *vars(module).values()):
            if type(tensor) is Tensor and not tensor.is_inference():
                yield tensor


def _weights(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (weight for weight in parameters_of(module).values() if type(weight) is nn.Parameter)


def _changed(tensors: Iterable[tuple[Tensor, int]]) -> Iterator[Tensor]:
    """Tensors that were changed in place since they had these versions."""
    return (tensor for tensor, version in tensors if version_of(tensor) != version)


def storages_of_state(modules: Iterable[nn.Module]) -> Set[int]:
    """The memory of the buffers and other tensors of modules that are put back for a recomputation."""
    return {storage for tensor in _tensors(modules) if (storage := storage_of(tensor)) is not None}
