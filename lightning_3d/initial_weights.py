"""Making all ranks start from the same weights, and dropping what lies on other stages."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.agreement import gather_numbers
from lightning_3d.errors import PlanError
from lightning_3d.plan import Plan
from lightning_3d.state import named_state


def synchronise(module: nn.Module, device: torch.device) -> None:
    """Give all ranks the weights and buffers of rank 0, if they differ.

    They differ if the model was built without a seed. Seeded ranks only exchange a checksum.

    Raises:
        PlanError: the ranks built different models, or a parameter or buffer is on the meta device; on all ranks.
    """
    state = {tensor: fqn for fqn, tensor, _ in named_state(module)}
    _check_same_model(state, device)
    if not state:
        return
    if missing := [fqn for tensor, fqn in state.items() if tensor.is_meta]:
        raise PlanError(
            f"{len(missing)} parameters or buffers are on the meta device ({', '.join(missing[:3])}, ...): the model"
            " has no weights yet. Build it without torch.device('meta') or init_module(empty_init=True)."
        )
    with torch.no_grad():
        hashes = [int(torch.hash_tensor(tensor.detach()).view(torch.int64)) for tensor in state]
        if len(set(gather_numbers(zlib.crc32(repr(hashes).encode()), device))) == 1:
            return
        for tensor in state:
            there = tensor.detach().to(device).contiguous()
            dist.broadcast(there, src=0)
            tensor.copy_(there)


def _check_same_model(state: Mapping[Tensor, str], device: torch.device) -> None:
    """Raise on all ranks if names, shapes or dtypes differ between ranks, which would crash every later collective."""
    described = [
        f"{fqn} {tuple(tensor.shape)} {tensor.dtype}" + (" on the meta device" if tensor.is_meta else "")
        for tensor, fqn in state.items()
    ]
    sums = gather_numbers(zlib.crc32("\n".join(described).encode()), device)
    other = next((rank for rank, value in enumerate(sums) if value != sums[0]), None)
    if other is None:
        return
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, described)
    pairs = zip_longest(everyone[0], everyone[other], fillvalue="nothing")
    first, second = next(pair for pair in pairs if pair[0] != pair[1])
    raise PlanError(
        f"The ranks built different models: where rank 0 has {first}, rank {other} has {second}. Build the model from"
        " the same code and arguments on every rank."
    )


def drop_absent(module: nn.Module, plan: Plan, stage: int) -> None:
    """Replace what other stages hold by meta tensors of the same shape; ties stay ties."""
    _replace(module, lambda fqn, tensor: tensor if plan.holds(stage, fqn) else torch.empty_like(tensor, device="meta"))


def move_to(module: nn.Module, device: torch.device) -> None:
    """Move what this rank holds; meta tensors stay."""
    _replace(module, lambda fqn, tensor: tensor if tensor.is_meta else tensor.detach().to(device))


def _replace(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> None:
    changed: dict[Tensor, Tensor] = {}
    for fqn, tensor, owner in list(named_state(module)):
        if tensor not in changed:
            new = change(fqn, tensor)
            is_new_parameter = isinstance(tensor, nn.Parameter) and new is not tensor
            changed[tensor] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_new_parameter else new
        name = fqn.rpartition(".")[2]
        members = owner._parameters if name in owner._parameters else owner._buffers
        members[name] = changed[tensor]  # type: ignore[assignment]
