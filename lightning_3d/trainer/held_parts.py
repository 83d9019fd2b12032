"""A module of which each rank holds a part, in the hands of code that knows nothing of it.

``load_state_dict`` takes whole values, of which each rank keeps its part; what is on other pipeline stages raises where
its values are needed, and ``to`` and the like leave it alone; ``state_dict`` warns that it gives parts. Copies
(``copy.deepcopy``) do all of this, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import fill, is_part
from lightning_3d.checkpoint.own_state import warn_of_parts
from lightning_3d.errors import StepError
from lightning_3d.model.absent import Stages, mark_absent
from lightning_3d.model.block_runner import SUMMON, runner_of
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.tensor.placement import Parts, marks_hidden, marks_of
from lightning_3d.torch_internals.fsdp_units import let_be_copied, without_units
from lightning_3d.torch_internals.modules import APPLY, buffers_of, named_state, parameters_of
from lightning_3d.trainer.part_tensors import watch_parts
from lightning_3d.zero.gathered import reshard_units


def holds_parts(module: nn.Module) -> bool:
    """Whether this rank lacks something of the module."""
    return any(map(is_part, module.parameters())) or any(map(is_part, module.buffers()))


def answer_for_parts(module: nn.Module, rendezvous: Rendezvous, stages: Stages) -> None:
    """Let a module that holds parts answer as described above.

    Args:
        stages: The module's.
    """
    if not holds_parts(module):
        return
    mark_absent(module, stages)
    watch_parts(module, rendezvous)
    for owner in module.modules():
        if isinstance(owner, FSDPModule):
            let_be_copied(owner)
        if any(map(is_part, (*parameters_of(owner).values(), *buffers_of(owner).values()))):
            owner.register_load_state_dict_pre_hook(_take_parts)
    warn_of_parts(module)
    vars(module)[APPLY] = MethodType(_apply_to_present, module)


def copy_in(module: nn.Module, model: nn.Module) -> nn.Module | None:
    """The copy of a model that a module is or has in it, or the model itself."""
    found = (inner for inner in module.modules() if type(inner) is type(model))
    return next((inner for inner in found if _described(inner) == _described(model)), None)


def is_held_as(copy: nn.Module, model: nn.Module) -> bool:
    """Whether a copy of a model is whole, or this rank has the parts of it that it has of the model."""
    reshard_units(model)
    pairs = zip(named_state(copy), named_state(model), strict=True)
    return not holds_parts(copy) or all(_place(own) == _place(like) for (_, own, _), (_, like, _) in pairs)


def _place(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else tensor.is_meta


def _described(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(fqn, tensor.shape) for fqn, tensor, _ in named_state(module)]


def own_part(whole: Tensor, like: Tensor, parts: Parts | None) -> Tensor:
    """This rank's part of a whole tensor, placed as another; of its own dtype and on its own device."""
    if like.is_meta:
        return torch.empty_like(whole, device="meta")
    if not isinstance(like, DTensor):
        return whole
    placed = torch.empty_like(like, dtype=whole.dtype, requires_grad=False)
    fill(placed, whole, parts)
    return placed.to(whole.device)


def _take_parts(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any], *_: Any
) -> None:
    parts = marks_of(module)
    for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
        value = state_dict.get(prefix + name)
        if tensor is None or not is_part(tensor) or not isinstance(value, Tensor):
            continue
        if local_metadata.get("assign_to_params_buffers"):
            raise StepError(
                f"load_state_dict(assign=True) would put another tensor in place of {prefix}{name}, of which this rank"
                " holds a part. Use assign=False."
            )
        if not is_part(value) and value.shape == tensor.shape:
            if tensor.is_meta:
                tensor.detach().copy_(value)  # raises for another parameter of this stage
            state_dict[prefix + name] = own_part(value, tensor, parts.get(name))


def _apply_to_present(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of ``nn.Module._apply``: what is on other pipeline stages stays on meta."""
    shards = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    if all(change(shard) is shard for shard in shards) and shards:
        return module
    try:
        return getattr(type(module), APPLY)(module, lambda t: t if t.is_meta else change(t), recurse)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise StepError(
            f"The shards of {type(module).__name__} can't be moved or converted ({error}). Copy the module {SUMMON},"
            " and move the copy."
        ) from error


def as_built(module: nn.Module) -> ExitStack:
    """Let a module whose tensors are whole run its own forward, without anything that served its parts, until the end
    of what this returns.
    """
    undone = ExitStack()
    for inner in list(module.modules()):
        if (runner := runner_of(inner)) is not None:
            undone.enter_context(runner.aside())
        if APPLY in vars(inner):
            undone.callback(vars(inner).update, {APPLY: vars(inner).pop(APPLY)})
    undone.enter_context(without_units(module))
    undone.enter_context(marks_hidden(module))
    return undone
