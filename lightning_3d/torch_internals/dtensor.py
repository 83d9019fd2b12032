"""DTensor: its parts, its sharding rules asked without any process group, and the collectives that it is made of.

torch 2.13 has no public way to ask "given these input placements, which output placements does this op have, and what
must be redistributed before it?"; `DTensor._op_dispatcher.sharding_propagator` is what DTensor itself asks, so a plan
made with it is what DTensor then does. Public alternatives need real DTensors and hence process groups.

Functional collectives return new tensors, which tracing needs; those of ``torch.distributed`` write in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.distributed._functional_collectives import (
    all_gather_single,
    all_reduce,
    all_to_all_single,
    reduce_scatter_single,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

from lightning_3d.torch_internals.dispatch import OpOverload
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_map_only

__all__ = ["all_gather_single", "all_reduce", "all_to_all_single", "reduce_scatter_single"]

# torch 2.13 has no rule for what its anomaly mode looks for NaN with.
register_sharding(torch.ops.aten._is_any_true.default)(lambda values: [([Replicate()], [Replicate()])])

StridedShard = _StridedShard
"""A dim that an inner axis of the mesh shards first, or that is sharded piece by piece."""

local_tensor: Callable[[DTensor], Tensor] = attrgetter("_local_tensor")
"""This rank's part, outside of autograd; ``to_local`` is an autograd function."""


def part_of(tensor: Tensor) -> Tensor:
    """The tensor as this rank holds it, outside of autograd."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


spec_of: Callable[[DTensor], DTensorSpec] = attrgetter("_spec")
"""Mesh, placements, shape and strides, from which ``DTensor(local, spec)`` is made."""


def placed(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor of a local tensor wherever that lies; ``from_local`` would move it to the mesh's device."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


class NoRule(Exception):
    """An op has no sharded form for its inputs; whoever asked runs it on full tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """An input of an op that is redistributed before the op runs."""

    tensor: Tensor
    source: Placement
    target: Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class Propagation:
    """DTensor's answer for one op: where its outputs are, and what moves before."""

    outputs: tuple[Placement | None, ...]
    """By leaf of the op's result; None for a leaf that is no tensor."""

    moves: tuple[Move, ...]


class ShardingRules:
    """The rules for a one-dimensional mesh of `size` ranks that exist only on paper."""

    def __init__(self, size: int) -> None:
        # A mesh without backend makes no process groups; rules read only its shape. Rank 0 stands for all of them.
        self._mesh = DeviceMesh("cpu", torch.arange(size), mesh_dim_names=("tp",), _init_backend=False, _rank=0)
        self._dispatcher = DTensor._op_dispatcher

    def propagate(
        self,
        op: OpOverload,
        args: Sequence[object],
        kwargs: dict[str, object],
        placement: Callable[[Tensor], Placement],
    ) -> Propagation:
        """Ask for one op.

        Args:
            op: The aten op.
            args: Its positional arguments; tensors have their full (global) shapes.
            kwargs: Its keyword arguments.
            placement: The placement of each tensor argument.

        Raises:
            NoRule: DTensor can't run the op on these placements.
        """
        if op in self._dispatcher._random_ops or op in self._dispatcher._custom_op_handlers:
            raise NoRule(str(op))

        def spec(tensor: Tensor) -> DTensorSpec:
            meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
            return DTensorSpec(self._mesh, (placement(tensor),), tensor_meta=meta)

        propagator = self._dispatcher.sharding_propagator
        info = propagator.op_to_schema_info.get(op)
        if info is None:
            info = propagator.op_to_schema_info_for_single_dim_strategy.get(op)
        args = _with_dims_from_0(op, args)
        schema = OpSchema(op, tree_map_only(Tensor, spec, args), tree_map_only(Tensor, spec, kwargs), schema_info=info)
        try:
            sharding = propagator.propagate_op_sharding_non_cached(schema)
        except Exception as error:  # whatever a rule raises, it means that this op can't be sharded this way
            raise NoRule(f"{op}: {error}") from error
        targets = schema if sharding.redistribute_schema is None else sharding.redistribute_schema
        outputs = tree_flatten(sharding.output_spec, is_leaf=lambda leaf: isinstance(leaf, DTensorSpec))[0]
        return Propagation(
            outputs=tuple(leaf.placements[0] if isinstance(leaf, DTensorSpec) else None for leaf in outputs),
            moves=tuple(self._moves(args, schema.args_schema, targets.args_schema)),
        )

    @staticmethod
    def _moves(args: Sequence[object], given: Sequence[object], wanted: Sequence[object]) -> list[Move]:
        tensors = [leaf for leaf in tree_leaves(tuple(args)) if isinstance(leaf, Tensor)]
        sources, targets = _specs(given), _specs(wanted)
        assert len(tensors) == len(sources) == len(targets), "DTensor's rules dropped an argument"
        pairs = zip(tensors, sources, targets, strict=True)
        return [Move(tensor=t, source=a, target=b) for t, a, b in pairs if a != b]


_OF_ONE_DIM_MORE = frozenset({torch.ops.aten.unsqueeze, torch.ops.aten.select_backward})
"""Ops whose ``dim`` is one of the result, which has a dim more than their tensor."""


def _with_dims_from_0(op: OpOverload, args: Sequence[object]) -> tuple[object, ...]:
    """The same arguments with dim 2 for dim -1: torch 2.13's rule of scans (``cumsum``) takes -1 for no dim at all."""
    if not args or not isinstance(args[0], Tensor) or op.overloadpacket in _OF_ONE_DIM_MORE:
        return tuple(args)
    num_dims = max(args[0].dim(), 1)
    given = zip(op._schema.arguments, args, strict=False)  # trailing ones may be left out
    return tuple([arg % num_dims if known.name == "dim" and type(arg) is int else arg for known, arg in given])


def _specs(schema: Sequence[object]) -> list[Placement]:
    leaves = tree_flatten(tuple(schema), is_leaf=lambda leaf: isinstance(leaf, DTensorSpec))[0]
    return [leaf.placements[0] for leaf in leaves if isinstance(leaf, DTensorSpec)]
