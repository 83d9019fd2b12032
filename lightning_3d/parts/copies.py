"""Copies of the model, which have its layout, so that each rank averages the part that it holds.

Those that are made of a parallel model have it from the start. Those that callbacks made before, as in ``setup`` to
average weights, take it with the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import StepError
from lightning_3d.model.initial_weights import of_rank
from lightning_3d.parts.module import holds_parts
from lightning_3d.parts.part_tensor import own_part
from lightning_3d.sharding.placement import interleaved_parameters, mark
from lightning_3d.torch_internals.fsdp_units import reshard_units
from lightning_3d.torch_internals.modules import named_state, put
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.attributes import successor


def copy_in(module: nn.Module, model: nn.Module) -> nn.Module | None:
    """The copy of a model that a module is or has in it, or the model itself."""
    found = (inner for inner in module.modules() if type(inner) is type(model))
    return next((inner for inner in found if _described(inner) == _described(model)), None)


def _described(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(fqn, tensor.shape) for fqn, tensor, _ in named_state(module)]


def is_held_as(copy: nn.Module, model: nn.Module) -> bool:
    """Whether a copy of a model is full, or this rank has the parts of it that it has of the model."""
    reshard_units(model)
    pairs = zip(named_state(copy), named_state(model), strict=True)
    return not holds_parts(copy) or all(_place(own) == _place(like) for (_, own, _), (_, like, _) in pairs)


def _place(tensor: Tensor) -> object:
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else tensor.is_meta


def copies_of(model: nn.Module, callbacks: Iterable[Callback]) -> list[nn.Module]:
    """The copies of a model that its callbacks hold."""
    values = (value for callback in callbacks for value in tree_leaves(list(vars(callback).values())))
    found = [copy_in(value, model) for value in values if isinstance(value, nn.Module)]
    return list(dict.fromkeys(copy for copy in found if copy is not None and copy is not model))


def lay_out_copies(copies: Sequence[nn.Module], model: nn.Module, device: torch.device) -> None:
    """Give copies of a model that are full the model's layout; every rank calls it."""
    if len(set(nums := gather_numbers(len(copies)))) > 1:
        raise StepError(
            f"The callbacks hold different numbers of copies of {type(model).__name__} (by rank: {nums}), but each rank"
            " averages a part of it. Give every rank the same callbacks."
        )
    likes, parts = {fqn: tensor for fqn, tensor, _ in named_state(model)}, interleaved_parameters(model)
    for copy in copies:
        laid_out: dict[Tensor, Tensor] = {}
        for fqn, tensor, owner in list(named_state(copy)):
            name = fqn.rpartition(".")[2]
            if tensor not in laid_out:
                full = of_rank(0, tensor, device).to(tensor.device)  # ranks differ if the model was built without seed
                laid_out[tensor] = successor(tensor, own_part(full, likes[fqn], parts.get(fqn)))
            put(owner, name, laid_out[tensor])
            if fqn in parts:
                mark(owner, name, parts[fqn])
