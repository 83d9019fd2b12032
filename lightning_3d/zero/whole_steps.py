"""Whole parameters for optimizers that need them, where tensor parallel or stage 3 has cut them.

Of the ranks that hold pieces of a parameter one is its owner, with balanced sizes. Before a step it gets the others'
pieces of values and gradients, and puts them in their original order; after it they get back theirs of the new values:

    rank 0    a[:2]  b[:2]          all of a, stepped          a[:2]  b[:2]
    rank 1    a[2:]  b[2:]    ->    all of b, stepped    ->    a[2:]  b[2:]

So its owner alone has the states of a parameter, and the whole of it only while the step runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.zero.owners import choose_owners
from lightning_3d.zero.shard import RankShard, plain

_BUCKET_BYTES = 2**28  # of whole parameters; what a rank sends and receives at a time is its share of them


class Box(Protocol):
    """A piece of what a rank holds of a tensor."""

    @property
    def full(self) -> tuple[slice, ...]:
        """Its place in the full tensor, in its original order."""

    @property
    def local(self) -> tuple[slice, ...]:
        """Its place in the local tensor."""


BoxesOf = Callable[[nn.Parameter, Sequence[int]], Sequence[Box]]
"""A parameter, and the coordinate of a rank in its mesh -> what this rank holds of it."""


@dataclass(frozen=True, kw_only=True)
class WholeParameter(RankShard):
    """A cut parameter that its owner steps whole."""

    group: dist.ProcessGroup
    """The ranks that hold its pieces."""
    boxes: Sequence[Sequence[Box]]
    """The pieces of each of them."""

    @property
    @override
    def stepped_shape(self) -> torch.Size:
        return self.parameter.shape

    @override
    def empty_state(self, dtype: torch.dtype) -> Tensor:
        shape, device = self.stepped_shape, plain(self.parameter).device
        return (
            torch.empty(shape, dtype=dtype, device=device) if self.new_state is None else self.new_state(shape, dtype)
        )


def whole_parameters(parameters: Iterable[nn.Parameter], mesh: Mesh, boxes_of: BoxesOf) -> list[WholeParameter]:
    """The parameters of which several ranks hold pieces, with owners, the largest first; every rank calls it."""
    groups = _groups(mesh)
    cut: dict[tuple[str, ...], dict[nn.Parameter, list[Sequence[Box]]]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor) and (names := _cutting(parameter)):
            boxes = [boxes_of(parameter, coordinate) for coordinate in _coordinates(parameter)]
            cut.setdefault(names, {})[parameter] = boxes
    return [
        WholeParameter(
            parameter=parameter,
            group=groups[names],
            boxes=members[parameter],
            size=groups[names].size(),
            rank=groups[names].rank(),
            owner=owner,
        )
        for names, members in cut.items()
        for parameter, owner in choose_owners(members, groups[names].size(), {}).items()
    ]


def _groups(mesh: Mesh) -> dict[tuple[str, ...], dist.ProcessGroup]:
    """Axes that cut parameters -> the ranks along them."""
    groups: dict[tuple[str, ...], dist.ProcessGroup] = {
        (axis,): mesh.sliced(axis).get_group() for axis in ("dp_shard", "tp")
    }
    if all(group.size() > 1 for group in groups.values()):
        both = mesh.groups.make_once(mesh.device_mesh.mesh.flatten(2).flatten(0, 1).tolist())
        assert both is not None, "the axes go through every rank"
        groups["dp_shard", "tp"] = both
    return groups


def _cutting(parameter: DTensor) -> tuple[str, ...]:
    """The axes whose ranks hold different pieces."""
    mesh = parameter.device_mesh
    cuts = zip(mesh.mesh_dim_names or (), mesh.shape, parameter.placements, strict=True)
    return tuple(name for name, size, placement in cuts if size > 1 and not placement.is_replicate())


def _coordinates(parameter: DTensor) -> Iterator[tuple[int, ...]]:
    """The ranks along these axes, through this rank."""
    mesh, cutting, own = parameter.device_mesh, _cutting(parameter), parameter.device_mesh.get_coordinate()
    assert own is not None, "this rank holds a piece"
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, own, strict=True)
    return product(*(range(size) if name in cutting else (index,) for name, size, index in axes))


@dataclass(frozen=True, kw_only=True)
class GatheredParameters:
    """The parameters of a step on their owners."""

    pieces: Mapping[nn.Parameter, Tensor]
    """This rank's piece of the values of each."""
    values: Mapping[nn.Parameter, Tensor]
    """The whole values of those that this rank owns."""
    gradients: Mapping[nn.Parameter, Tensor]
    """Their whole gradients."""


class WholeSteps:
    """Moves pieces of cut parameters to their owners, and back.

    Args:
        parameters: The largest first.
        device: Where collectives run.
    """

    def __init__(self, parameters: Sequence[WholeParameter], device: torch.device) -> None:
        self._parameters, self._device = parameters, device

    @torch.no_grad()
    def gather(
        self, parameters: Iterable[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]
    ) -> GatheredParameters:
        """Bring parameters to their owners; every rank calls it.

        Args:
            gradients: This rank's part of those that there are.
        """
        pieces = {parameter: part_of(parameter).detach() for parameter in parameters}
        return GatheredParameters(pieces=pieces, values=self._gathered(pieces), gradients=self._gathered(gradients))

    @torch.no_grad()
    def give_back(self, wholes: Mapping[nn.Parameter, Tensor], pieces: Mapping[nn.Parameter, Tensor]) -> None:
        """The other way: write whole tensors of their owners into the pieces of all; every rank calls it."""
        self._exchange(pieces, wholes, back=True)

    def own(self, parameter: nn.Parameter, state: Tensor) -> Tensor:
        """A state like a cut parameter, whole on its owner, of no use on others; every rank calls it."""
        return (
            self._gathered({parameter: part_of(state)}).get(parameter, state) if isinstance(state, DTensor) else state
        )

    def _gathered(self, pieces: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The whole tensors that this rank owns."""
        wholes = {
            whole.parameter: piece.new_empty(whole.stepped_shape)
            for whole in self._parameters
            if (piece := pieces.get(whole.parameter)) is not None and not whole.owned_by_other
        }
        self._exchange(pieces, wholes, back=False)
        return wholes

    def _exchange(
        self, pieces: Mapping[nn.Parameter, Tensor], wholes: Mapping[nn.Parameter, Tensor], *, back: bool
    ) -> None:
        for bucket in self._buckets(pieces):
            group, dtype, peers = bucket[0].group, pieces[bucket[0].parameter].dtype, range(bucket[0].size)
            held = [
                [pieces[p.parameter][box.local] for p in bucket if p.owner == peer for box in p.boxes[p.rank]]
                for peer in peers
            ]
            owned = [
                [wholes[p.parameter][box.full] for p in bucket if not p.owned_by_other for box in p.boxes[peer]]
                for peer in peers
            ]
            sources, targets = (owned, held) if back else (held, owned)
            to_send, to_receive = (
                [sum(tensor.nbytes for tensor in tensors) for tensors in t] for t in (sources, targets)
            )
            sent, received = (
                torch.empty(sum(sizes), dtype=torch.uint8, device=self._device) for sizes in (to_send, to_receive)
            )
            for tensor, part in _in_a_row(sources, sent.view(dtype)):
                part.copy_(tensor)
            dist.all_to_all_single(received, sent, to_receive, to_send, group=group)
            for tensor, part in _in_a_row(targets, received.view(dtype)):
                tensor.copy_(part)

    def _buckets(self, pieces: Mapping[nn.Parameter, Tensor]) -> Iterator[list[WholeParameter]]:
        """Parameters of one dtype and group, that go by one collective."""
        filling: dict[tuple[dist.ProcessGroup, torch.dtype], list[WholeParameter]] = {}
        for whole in self._parameters:
            if (piece := pieces.get(whole.parameter)) is None:
                continue
            bucket = filling.setdefault(key := (whole.group, piece.dtype), [])
            bucket.append(whole)
            if sum(p.parameter.numel() for p in bucket) * piece.element_size() >= _BUCKET_BYTES:
                yield filling.pop(key)
        yield from filling.values()


def _in_a_row(tensors: Sequence[Sequence[Tensor]], row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor, and its place in a row of all of them."""
    flat = [tensor for of_rank in tensors for tensor in of_rank]
    parts = row.split([tensor.numel() for tensor in flat])
    return ((tensor, part.view(tensor.shape)) for tensor, part in zip(flat, parts, strict=True))
