"""Gradients across the mesh: their norm, and the sum for parameters that several stages hold."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.torch_internals.dispatch import foreach_norm
from lightning_3d.zero.engine import Zero


class Gradients:
    """Knows on which ranks each parameter of the model lies.

    Args:
        module: The user's module, sharded.
        zero: Holds the gradients.
        state_ranks: FQN of each parameter -> indices on the pp axis of the ranks that hold it, ascending.
        mesh: This rank's.
    """

    def __init__(
        self,
        module: nn.Module,
        zero: Zero,
        state_ranks: Mapping[str, tuple[int, ...]],
        mesh: Mesh,
        device: torch.device,
    ) -> None:
        self._zero, self._mesh, self._device = zero, mesh, device
        is_double = any(parameter.dtype == torch.float64 for parameter in module.parameters())
        self._dtype = torch.float64 if is_double else torch.float32  # of norms, alike on all ranks
        self._fqns = {p: fqn for fqn, p in module.named_parameters() if not p.is_meta}
        self._owned = {p for p, fqn in self._fqns.items() if state_ranks[fqn][0] == mesh.pp_rank}
        self._shared = _shared_parameters(self._fqns, state_ranks)
        self._groups = _stage_groups(self._shared, mesh)

    def _is_first_copy(self, parameter: nn.Parameter) -> bool:
        """Whether, of all ranks that hold the same part of its gradient, this one is the first along each axis."""
        coordinate = {"state": self._mesh.state_rank, "tp": self._mesh.tp_rank}
        names = parameter.device_mesh.mesh_dim_names or () if isinstance(parameter, DTensor) else ()
        if self._zero.shards[parameter].size > 1 or "dp_shard" in names:
            coordinate["state"] //= self._mesh.num_shards  # which group of ranks that share the state
        if isinstance(parameter, DTensor):
            for axis, name in enumerate(names):
                coordinate.pop(name, None)
                if parameter.placements[axis].is_replicate() and parameter.device_mesh.get_local_rank(axis) > 0:
                    return False
        return not any(coordinate.values())

    def norm(self, parameters: Iterable[nn.Parameter] | None = None, norm_type: float = 2.0) -> Tensor:
        """Norm of the gradients of ``parameters`` (all by default) as if they lay in one process; a 0-d tensor.

        Every rank calls it.
        """
        chosen = self._fqns if parameters is None else parameters
        local = [self._zero.gradient(p) for p in chosen if p in self._owned and self._is_first_copy(p)]
        norms = foreach_norm(found, norm_type) if (found := [g for g in local if g is not None and g.numel()]) else []
        norms = [norm.to(self._device, self._dtype) for norm in norms]
        stacked = torch.stack(norms) if norms else torch.zeros(1, dtype=self._dtype, device=self._device)
        if norm_type == float("inf"):
            total = stacked.max()
            dist.all_reduce(total, dist.ReduceOp.MAX)
            return total
        total = stacked.pow(norm_type).sum()
        dist.all_reduce(total)
        return total.pow(1.0 / norm_type)

    @torch.no_grad()
    def sum_shared(self, among: Collection[nn.Parameter] | None = None) -> None:
        """Sum the gradients of tied and glue parameters over the stages that hold them; those of none stay None.

        Args:
            among: Only of these; of all without it.
        """
        for stages, shared in self._shared.items():
            parameters = shared if among is None else [parameter for parameter in shared if parameter in among]
            if not parameters:
                continue
            found = [self._zero.gradient(parameter) for parameter in parameters]
            local = [
                torch.zeros_like(self._zero.shards[parameter].own(parameter)) if gradient is None else gradient
                for parameter, gradient in zip(parameters, found, strict=True)
            ]
            there = torch.stack([local[0].new_full((), gradient is not None) for gradient in found])
            flat = torch.cat([*(gradient.reshape(-1) for gradient in local), there]).to(self._device)
            dist.all_reduce(flat, group=self._groups[stages])
            *totals, numbers = flat.split([*(gradient.numel() for gradient in local), len(local)])
            for gradient, total in zip(local, totals, strict=True):
                gradient.copy_(total.view_as(gradient))
            missing = [i for i, gradient in enumerate(found) if gradient is None]
            counts = numbers.tolist() if missing else []
            for i in missing:
                if counts[i]:
                    self._zero.set_gradient(parameters[i], local[i])


def _shared_parameters(
    fqns: Mapping[nn.Parameter, str], state_ranks: Mapping[str, tuple[int, ...]]
) -> dict[tuple[int, ...], list[nn.Parameter]]:
    """Stages -> the trainable parameters that exactly these hold, in an order that is the same on all of them."""
    shared: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter, fqn in sorted(fqns.items(), key=lambda item: item[1]):
        ranks = state_ranks[fqn]
        if len(ranks) > 1 and parameter.requires_grad:
            shared.setdefault(ranks, []).append(parameter)
    return shared


def _stage_groups(
    shared: Mapping[tuple[int, ...], list[nn.Parameter]], mesh: Mesh
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """A group for every set of stages that shares parameters. All ranks make all groups, in the same order."""
    everyone: list[set[tuple[int, ...]] | None] = [None] * mesh.shape.world_size
    dist.all_gather_object(everyone, set(shared))
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for stages in sorted(set().union(*(found for found in everyone if found))):
        group = mesh.groups.make_once([[ranks[stage] for stage in stages] for ranks in mesh.shape.pipelines()])
        if group is not None:
            groups[stages] = group
    return groups
