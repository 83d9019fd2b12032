"""A whole model on every rank, of which each rank otherwise holds a part: for a while, or for good, or one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import fill, full_value, is_part
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.planning.plan import Plan
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.tensor.placement import Parts, marked, order_of
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.fsdp_units import forget_units
from lightning_3d.torch_internals.modules import named_state, put
from lightning_3d.trainer.held_parts import as_built
from lightning_3d.zero.attributes import users_attributes
from lightning_3d.zero.gathered import reshard_units

Slots = dict[Tensor, tuple[str, list[tuple[nn.Module, str]]]]
"""Parameters and buffers -> their first FQN in the model, and all places where it holds them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PipelineStages:
    """The stages of a model, which send each other values between steps and in steps that run inline.

    Args:
        ranks: Those that have a part of the model among them.
    """

    plan: Plan
    mesh: Mesh
    device: torch.device
    ranks: Sequence[int]
    rendezvous: Rendezvous

    @property
    def are_met(self) -> bool:
        """Whether the present code runs on all stages alike."""
        return self.are_between_steps or self.plan.inline is not None

    @property
    def are_between_steps(self) -> bool:
        """Whether a stage that calls `values` alone raises."""
        return not self.rendezvous.is_agreed

    def holders(self, fqn: str) -> frozenset[int]:
        """Indices on the pp axis of the ranks that have a parameter or buffer."""
        return frozenset(self.plan.state_ranks.get(fqn, range(self.mesh.shape.pp)))

    def values(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The full values on every rank of tensors that some stages lack, the others as they are; all ranks call it."""
        self.rendezvous.meet(self.ranks, f"{what} of tensors of several pipeline stages")
        own = [not tensor.is_meta for tensor in tensors]
        everyone = [own] * self.mesh.shape.pp
        dist.all_gather_object(everyone, own, group=self.mesh.group("pp"))
        values = []
        with torch.no_grad(), DisableTorchFunctionSubclass():
            for tensor, *are_there in zip(tensors, *everyone, strict=True):
                stages = tuple(i for i, is_there in enumerate(are_there) if is_there)
                is_lacked = 0 < len(stages) < len(everyone)
                values.append(_whole(tensor, order_of(tensor), stages, self.mesh, self.device) if is_lacked else tensor)
        return values


@contextmanager
def full_params(
    root: nn.Module, module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device, *, writeback: bool
) -> Iterator[None]:
    """Let a module of the model be plain and whole on every rank, as it was built; every rank enters and leaves.

    Args:
        root: The model, or a copy of it.
        module: One of its modules, or one that it is in.
        writeback: Whether each rank takes its part of the changed values afterwards; all must change them alike.
    """
    parts, slots = marked(root), _slots(root, module)
    holders = _holders(slots, plan, mesh)
    wholes: dict[Tensor, Tensor] = {}
    for tensor, (fqn, _) in slots.items():
        is_whole = not is_part(tensor) and len(holders[fqn]) == mesh.shape.pp
        stays = is_whole and writeback  # else changes are to be lost
        wholes[tensor] = tensor if stays else _like(tensor, _whole(tensor, parts.get(fqn), holders[fqn], mesh, device))
    with ExitStack() as stack:
        for tensor, (fqn, owners) in slots.items():
            stack.callback(_put_back, tensor, wholes[tensor], parts.get(fqn), owners, writeback=writeback)
            for owner, name in owners:
                put(owner, name, wholes[tensor])
        stack.enter_context(as_built(module))
        yield


def stay_whole(module: nn.Module, plan: Plan, mesh: Mesh, device: torch.device) -> None:
    """Let a model be plain and whole on every rank for good, as it was built, on the CPU; every rank calls it.

    What every rank has whole stays as it is, where it is.
    """
    reshard_units(module)
    parts, slots = marked(module), _slots(module, module)
    holders = _holders(slots, plan, mesh)
    for tensor, (fqn, owners) in slots.items():
        if isinstance(tensor, DTensor) or len(holders[fqn]) < mesh.shape.pp:
            whole = _like(tensor, _whole(tensor, parts.get(fqn), holders[fqn], mesh, device).cpu())
            for owner, name in owners if is_part(tensor) else ():
                put(owner, name, whole)
    as_built(module).pop_all()  # never to be undone
    forget_units(module)


def _slots(root: nn.Module, module: nn.Module) -> Slots:
    wanted = {tensor for _, tensor, _ in named_state(module)}
    slots: Slots = {}
    for fqn, tensor, owner in named_state(root):
        if tensor in wanted:
            slots.setdefault(tensor, (fqn, []))[1].append((owner, fqn.rpartition(".")[2]))
    return slots


def _holders(slots: Slots, plan: Plan, mesh: Mesh) -> dict[str, tuple[int, ...]]:
    """FQN -> indices on the pp axis of the ranks that hold it, also of what came after the plan; a collective there."""
    present = [fqn for tensor, (fqn, _) in slots.items() if not tensor.is_meta]
    everyone = [present] * mesh.shape.pp
    if mesh.shape.pp > 1:
        dist.all_gather_object(everyone, present, group=mesh.group("pp"))
    found = {fqn: tuple(i for i, held in enumerate(everyone) if fqn in held) for _, (fqn, _) in slots.items()}
    return {fqn: plan.state_ranks.get(fqn, ranks) for fqn, ranks in found.items()}


def _whole(tensor: Tensor, parts: Parts | None, stages: tuple[int, ...], mesh: Mesh, device: torch.device) -> Tensor:
    if tensor.is_meta:
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    else:
        whole = full_value(tensor.detach().to(device))
        whole = (whole if parts is None else parts.ungrouped(whole)).clone(memory_format=torch.contiguous_format)
    if mesh.shape.pp > len(stages) and whole.numel():
        dist.broadcast(whole.view(-1).view(torch.uint8), group=mesh.group("pp"), group_src=stages[0])  # of any dtype
    return whole


def _like(tensor: Tensor, whole: Tensor) -> Tensor:
    if isinstance(tensor, nn.Parameter):
        whole = nn.Parameter(whole, requires_grad=tensor.requires_grad)
    vars(whole).update(users_attributes(tensor))
    return whole


def _put_back(
    tensor: Tensor, whole: Tensor, parts: Parts | None, owners: list[tuple[nn.Module, str]], *, writeback: bool
) -> None:
    given = whole
    for owner, name in owners:
        whole = getattr(owner, name) if getattr(owner, name) is not given else whole  # another than was put there
        put(owner, name, tensor)
    if writeback and whole is not tensor and not tensor.is_meta:
        fill(tensor.detach(), whole.detach(), parts)
