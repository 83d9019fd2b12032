"""Whole parameters for optimizers that need them, where tensor parallel or stage 3 has cut them.

Of the ranks that hold pieces of a parameter one is its owner, with balanced sizes. Before a step it gets the others'
pieces of values and gradients, and puts them in their original order; after it they get back theirs of the new values:

    rank 0    a[:2]  b[:2]          all of a, stepped          a[:2]  b[:2]
    rank 1    a[2:]  b[2:]    ->    all of b, stepped    ->    a[2:]  b[2:]

So its owner alone has the states of a parameter, and the whole of it only while the step runs. An optimizer that needs
all parameters together steps them on every rank, which gets the pieces of all, also of other pipeline stages, and keeps
its own of the new values.
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
from lightning_3d.zero.owners import bytes_received, choose_owners
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
    """A parameter of which ranks hold pieces, stepped whole by its owner, or by every rank where it has none."""

    group: dist.ProcessGroup
    """The ranks that hold its pieces."""
    boxes: Sequence[Sequence[Box]]
    """The pieces that each of them sends."""
    own_boxes: Sequence[Box]
    """Pieces that this rank holds; none of a parameter of another pipeline stage."""

    @property
    def is_cut(self) -> bool:
        """Whether no rank has the whole of it between steps."""
        return sum(map(bool, self.boxes)) > 1

    @property
    def received_bytes(self) -> float:
        """Bytes that a rank receives for a step, in the mean."""
        num_bytes = self.parameter.numel() * self.parameter.itemsize
        return bytes_received(num_bytes, self.size, has_owner=self.owner is not None)

    @property
    @override
    def steps_part(self) -> bool:
        return False

    @property
    @override
    def stepped_shape(self) -> torch.Size:
        return self.parameter.shape

    @override
    def like_parameter(self, own: Tensor) -> Tensor:
        return own

    @override
    def empty_state(self, dtype: torch.dtype) -> Tensor:
        shape, device = self.stepped_shape, plain(self.parameter).device
        return (
            torch.empty(shape, dtype=dtype, device=device) if self.new_state is None else self.new_state(shape, dtype)
        )


def whole_parameters(parameters: Iterable[nn.Parameter], mesh: Mesh, boxes_of: BoxesOf) -> list[WholeParameter]:
    """The parameters of which several ranks hold pieces, with owners, the largest first; every rank calls it."""
    axes: tuple[tuple[str, ...], ...] = (("dp_shard",), ("tp",), ("dp_shard", "tp"))
    groups = {names: _group(mesh, names) for names in axes}
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
            own_boxes=members[parameter][groups[names].rank()],
            size=groups[names].size(),
            rank=groups[names].rank(),
            owner=owner,
        )
        for names, members in cut.items()
        for parameter, owner in choose_owners(members, groups[names].size(), {}).items()
    ]


def parameters_on_all(
    parameters: Mapping[str, nn.Parameter], mesh: Mesh, own_boxes: Mapping[str, Sequence[Box]], *, cuts_replicas: bool
) -> list[WholeParameter]:
    """Parameters without owners, as every rank steps them, if ranks may hold pieces of them; every rank calls it.

    Those that a rank holds whole are sent to it, too, so that all ranks step the same numbers, whatever kernels made of
    their copies, and an optimizer that decides by them decides alike.

    Args:
        parameters: FQN -> parameter, the same on all ranks; those of other pipeline stages are on the meta device.
        own_boxes: FQN -> what this rank holds of it.
        cuts_replicas: Whether ranks along ``dp_shard`` hold different pieces.
    """
    group = _group(mesh, ("pp", "dp_shard", "tp") if cuts_replicas else ("pp", "tp"))
    if group.size() == 1:
        return []
    of_ranks: list[Mapping[str, Sequence[Box]]] = [{}] * group.size()
    dist.all_gather_object(of_ranks, own_boxes, group=group)
    return [
        WholeParameter(
            parameter=parameter,
            group=group,
            boxes=_each_once(of_rank.get(fqn, ()) for of_rank in of_ranks),
            own_boxes=own_boxes.get(fqn, ()),
            size=group.size(),
            rank=group.rank(),
        )
        for fqn, parameter in parameters.items()
    ]


def _each_once(held: Iterable[Sequence[Box]]) -> list[list[Box]]:
    """The pieces that each rank sends, where several hold the same: the first of them does."""
    seen = list[tuple[slice, ...]]()
    sent = list[list[Box]]()
    for boxes in held:
        sent.append([box for box in boxes if box.full not in seen])
        seen += [box.full for box in sent[-1]]
    return sent


def _group(mesh: Mesh, names: tuple[str, ...]) -> dist.ProcessGroup:
    """The ranks along these axes, through this one."""
    long = [name for name in names if mesh.sliced(name).size() > 1]
    if len(long) <= 1:
        return mesh.sliced(*long or names[:1]).get_group()
    all_names, ranks = mesh.device_mesh.mesh_dim_names or (), mesh.device_mesh.mesh
    dims = [all_names.index(name) for name in long]
    others = [dim for dim in range(ranks.dim()) if dim not in dims]
    group = mesh.groups.make_once(ranks.permute(*others, *dims).flatten(len(others)).flatten(0, -2).tolist())
    assert group is not None, "the axes go through every rank"
    return group


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
        on_all = [whole for whole in self._parameters if whole.owner is None and whole.parameter in pieces]
        gradients = self._with_others(on_all, gradients) if on_all else gradients
        return GatheredParameters(pieces=pieces, values=self._gathered(pieces), gradients=self._gathered(gradients))

    def mean_loss(self, loss: object) -> object:
        """The mean over all ranks of what a closure returned: of the batches of all, bit by bit the same on each.

        Optimizers that decide by it, as a line search does, would decide otherwise on other ranks.
        """
        own = loss.item() if isinstance(loss, Tensor) else 0.0  # no loss: of a rank that skips the batch
        mean = torch.tensor(own / dist.get_world_size(), dtype=torch.float64, device=self._device)
        dist.all_reduce(mean)
        return mean.to(loss) if isinstance(loss, Tensor) else loss

    @torch.no_grad()
    def give_back(self, wholes: Mapping[nn.Parameter, Tensor], pieces: Mapping[nn.Parameter, Tensor]) -> None:
        """The other way: write whole tensors of their owners into the pieces of all; every rank calls it."""
        stepped_here = [whole for whole in self._parameters if whole.owner is None and whole.parameter in wholes]
        for whole in stepped_here:
            for box in whole.own_boxes:
                pieces[whole.parameter][box.local].copy_(wholes[whole.parameter][box.full])
        done = {whole.parameter for whole in stepped_here}
        self._exchange({p: piece for p, piece in pieces.items() if p not in done}, wholes, back=True)

    def own(self, parameter: nn.Parameter, state: Tensor) -> Tensor:
        """A state like a parameter, whole on those that step it, of no use on others; every rank calls it."""
        is_whole = not isinstance(state, DTensor) and not state.is_meta  # also one made by the shape of a cut parameter
        if is_whole and any(whole.parameter is parameter and whole.is_cut for whole in self._parameters):
            return state
        return self._gathered({parameter: part_of(state)}).get(parameter, state)

    def _with_others(
        self, on_all: Sequence[WholeParameter], gradients: Mapping[nn.Parameter, Tensor]
    ) -> Mapping[nn.Parameter, Tensor]:
        """These gradients, and those that only other pipeline stages have a part of, without values."""
        there = torch.tensor([whole.parameter in gradients for whole in on_all], dtype=torch.uint8).to(self._device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=on_all[0].group)
        found = [whole.parameter for whole, is_there in zip(on_all, there.tolist(), strict=True) if is_there]
        return {p: torch.empty_like(part_of(p), device="meta") for p in found if p not in gradients} | {**gradients}

    def _gathered(self, pieces: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """The whole tensors that this rank owns."""
        wholes = {
            whole.parameter: piece.new_empty(whole.stepped_shape, device=plain(whole.parameter).device)
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
                [pieces[p.parameter][box.local] for p in bucket if p.owner in (peer, None) for box in p.boxes[p.rank]]
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
