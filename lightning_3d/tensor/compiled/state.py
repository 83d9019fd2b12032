"""The state that a block's forward reads besides its arguments: tensors, and values that its modules hold."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.model.norm_forward import is_watched
from lightning_3d.tensor.collectives import own_shard
from lightning_3d.tensor.compiled.values import Values
from lightning_3d.tensor.sharded_tensor import ShardedTensor
from lightning_3d.torch_internals.capture import NotCompilable
from lightning_3d.torch_internals.modules import BUFFERS, CALL, PARAMETERS, TORCH_ATTRIBUTES, children_of, has_hooks
from lightning_3d.torch_internals.tensors import count_as_parameter

_OF_THIS_PACKAGE = frozenset({"forward", CALL})
"""Attributes that ``BlockRunner`` sets on a block."""


class _Place(NamedTuple):
    """Where a tensor is found."""

    holder: dict[str, Any]
    """A module's parameters, its buffers, or its plain attributes."""

    name: str
    at: int
    """Its position among the tensors of the state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockState:
    """Tensors and values in the modules of a block, at one time."""

    tensors: Sequence[Tensor]
    """Parameters, buffers and other tensors, each once."""

    places: Sequence[_Place]

    values: tuple[Hashable, ...]
    """Everything else, comparable."""

    def own(self) -> list[Tensor]:
        """The tensors, with this rank's shards in place of DTensors; differentiable."""
        return [own_part(tensor) for tensor in self.tensors]

    @contextmanager
    def replaced(self, own: Sequence[Tensor]) -> Iterator[None]:
        """Temporarily replace the block's tensors, which `own` gives, by others."""
        stand_ins = [_like(tensor, other) for tensor, other in zip(self.tensors, own, strict=True)]
        try:
            for place in self.places:
                place.holder[place.name] = stand_ins[place.at]
            yield
        finally:
            for place in self.places:
                place.holder[place.name] = self.tensors[place.at]


def copied(leaves: Sequence[Any]) -> list[Any]:
    """The same without history, tensors in memory of their own."""
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def own_part(tensor: Tensor) -> Tensor:
    """This rank's shard; a plain tensor as it is."""
    if isinstance(tensor, ShardedTensor):
        return tensor.own()
    return own_shard(tensor) if isinstance(tensor, DTensor) else tensor


def _like(old: Tensor, own: Tensor) -> Tensor:
    """A DTensor for a DTensor, a parameter for a parameter."""
    if isinstance(old, DTensor):
        shape, stride = old.shape, old.stride()
        own = DTensor.from_local(own, old.device_mesh, old.placements, run_check=False, shape=shape, stride=stride)
    if isinstance(old, nn.Parameter):
        count_as_parameter(own)
    return own


def read_state(block: nn.Module) -> BlockState:
    """Walk the modules of a block.

    Raises:
        NotCompilable: a module inside of it has hooks, or is a norm whose calls somebody sees: Python must call these;
            or it refers to what may change and can't be compared.
    """
    tensors: list[Tensor] = []
    places: list[_Place] = []
    values: list[Any] = []
    indices: dict[int, int] = {}
    modules = list(_modules(block))
    compared = Values(modules)

    def note(holder: dict[str, Any], name: str, tensor: Tensor) -> None:
        if id(tensor) not in indices:
            indices[id(tensor)] = len(tensors)
            tensors.append(tensor)
        places.append(_Place(holder, name, indices[id(tensor)]))

    for module in modules:
        if module is not block and has_hooks(module):
            raise NotCompilable(f"{type(module).__name__} inside of it has hooks")
        if is_watched(module) and module.training:
            raise NotCompilable(f"{type(module).__name__} inside of it gets its running statistics from microbatches")
        attributes = vars(module)
        values += [compared.of_class(type(module)), module.training, len(attributes)]
        for group in (PARAMETERS, BUFFERS):
            for name, tensor in attributes[group].items():
                if tensor is not None:
                    note(attributes[group], name, tensor)
        for name, value in attributes.items():
            if name in TORCH_ATTRIBUTES or (module is block and name in _OF_THIS_PACKAGE):
                continue
            if isinstance(value, Tensor):
                note(attributes, name, value)
            else:
                values.append(compared.of(value))
    return BlockState(tensors=tensors, places=places, values=tuple(values))


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in children_of(module).values():
        if child is not None:
            yield from _modules(child)
