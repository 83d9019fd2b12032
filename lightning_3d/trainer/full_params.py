"""Whole parameters of a model of which each rank holds a part, for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.checkpoint.box import fill, full_value
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.tensor.placement import Parts, marked
from lightning_3d.torch_internals.modules import parameters_of


@contextmanager
def full_params(
    root: nn.Module, module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device, *, writeback: bool
) -> Iterator[None]:
    """Let a module of the model have plain, whole parameters on every rank; every rank enters and leaves.

    Args:
        root: The model.
        module: One of its modules, or itself.
        writeback: Whether each rank takes its part of the changed values afterwards; all must change them alike.
    """
    parts, slots = marked(root), _slots(root, module)
    wholes: dict[nn.Parameter, nn.Parameter] = {}
    for parameter, (fqn, _) in slots.items():
        whole = _whole(parameter, parts.get(fqn), plan.state_ranks[fqn], mesh, device)
        wholes[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
    try:
        for parameter, (_, owners) in slots.items():
            for owner, name in owners:
                parameters_of(owner)[name] = wholes[parameter]
        yield
    finally:
        for parameter, (fqn, owners) in slots.items():
            for owner, name in owners:
                parameters_of(owner)[name] = parameter
            if writeback and not parameter.is_meta:
                values = wholes[parameter].detach()
                fill(parameter.detach(), parts[fqn].grouped(values) if fqn in parts else values)


def _slots(root: nn.Module, module: nn.Module) -> dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]]:
    """Parameters of `module` -> their first FQN in `root`, and all places where `root` holds them."""
    wanted = set(module.parameters())
    slots: dict[nn.Parameter, tuple[str, list[tuple[nn.Module, str]]]] = {}
    for prefix, owner in root.named_modules():
        for name, parameter in parameters_of(owner).items():
            if parameter is not None and parameter in wanted:
                fqn = f"{prefix}.{name}" if prefix else name
                slots.setdefault(parameter, (fqn, []))[1].append((owner, name))
    return slots


def _whole(
    parameter: nn.Parameter, parts: Parts | None, stages: tuple[int, ...], mesh: Mesh, device: torch.device
) -> Tensor:
    if parameter.is_meta:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
    else:
        whole = full_value(parameter.detach())
        whole = (whole if parts is None else parts.ungrouped(whole)).clone(memory_format=torch.contiguous_format)
    if mesh.shape.pp > len(stages):
        dist.broadcast(whole, group=mesh.group("pp"), group_src=stages[0])
    return whole
