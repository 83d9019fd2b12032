"""The full model on every rank, of which each rank otherwise holds a part: for a while, or for good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import fill, is_part
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.parts.module import as_built
from lightning_3d.parts.references import follow
from lightning_3d.parts.stages import full_on_all, holders_of
from lightning_3d.sharding.placement import InterleavedShard, interleaved_parameters
from lightning_3d.torch_internals.fsdp_units import forget_units, reshard_units
from lightning_3d.torch_internals.modules import named_state, put
from lightning_3d.zero.attributes import successor

Slots = dict[Tensor, tuple[str, list[tuple[nn.Module, str]]]]
"""Parameters and buffers -> their first FQN in the model, and all places where it holds them."""


@contextmanager
def full_params(
    root: nn.Module, module: nn.Module, mesh: Mesh, device: torch.device, *, writeback: bool
) -> Iterator[None]:
    """Let a module of the model be plain and full on every rank, as it was built; every rank enters and leaves.

    Args:
        root: The model, or a copy of it.
        module: One of its modules, or one that it is in.
        writeback: Whether each rank takes its part of the changed values afterwards; all must change them alike.
    """
    parts, slots, now = interleaved_parameters(root), _slots(root, module), dict[Tensor, Tensor]()
    with ExitStack() as stack:
        for (tensor, (fqn, owners)), stages in zip(slots.items(), holders_of(slots, mesh), strict=True):
            full = tensor
            if is_part(tensor) or len(stages) < mesh.shape.pp or not writeback:  # else changes are to be lost
                full = successor(tensor, full_on_all(tensor, parts.get(fqn), stages, mesh, device))
            stack.callback(_put_back, tensor, full, parts.get(fqn), owners, writeback=writeback)
            for owner, name in owners:
                put(owner, name, full)
            now[tensor] = full
        follow(root, now)
        stack.callback(follow, root, {full: tensor for tensor, full in now.items()})
        stack.enter_context(as_built(module))
        yield


def stay_full(module: nn.Module, mesh: Mesh, device: torch.device) -> None:
    """Let a model be plain and full on every rank for good, as it was built, on the CPU; every rank calls it.

    What every rank has in full stays as it is, where it is.
    """
    reshard_units(module)
    parts, slots, now = interleaved_parameters(module), _slots(module, module), dict[Tensor, Tensor]()
    for (tensor, (fqn, owners)), stages in zip(slots.items(), holders_of(slots, mesh), strict=True):
        if isinstance(tensor, DTensor) or len(stages) < mesh.shape.pp:
            full = successor(tensor, full_on_all(tensor, parts.get(fqn), stages, mesh, device).cpu())
            for owner, name in owners if is_part(tensor) else ():
                put(owner, name, full)
                now[tensor] = full
    follow(module, now)
    as_built(module).pop_all()  # never to be undone
    forget_units(module)


def _slots(root: nn.Module, module: nn.Module) -> Slots:
    wanted = {tensor for _, tensor, _ in named_state(module)}
    slots: Slots = {}
    for fqn, tensor, owner in named_state(root):
        if tensor in wanted:
            slots.setdefault(tensor, (fqn, []))[1].append((owner, fqn.rpartition(".")[2]))
    return slots


def _put_back(
    tensor: Tensor,
    full: Tensor,
    parts: InterleavedShard | None,
    owners: list[tuple[nn.Module, str]],
    *,
    writeback: bool,
) -> None:
    found = [getattr(owner, name) for owner, name in owners]  # before any is put back: a module may have two names
    full = next((other for other in found if other is not full), full)  # another than was put there
    for owner, name in owners:
        put(owner, name, tensor)
    if writeback and full is not tensor and not tensor.is_meta:
        fill(tensor.detach(), full.detach(), parts)
