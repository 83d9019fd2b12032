"""Copies of the model that callbacks made before it became parallel: those that average weights make one in ``setup``.

They take the model's layout, so that each rank averages the part that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import StepError
from lightning_3d.model.initial_weights import of_rank
from lightning_3d.tensor.placement import mark, marked
from lightning_3d.torch_internals.modules import named_state, put
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trainer.held_parts import copy_in, own_part
from lightning_3d.zero.attributes import users_attributes


def copies_of(model: nn.Module, callbacks: Iterable[Callback]) -> list[nn.Module]:
    """The copies of a model that its callbacks hold."""
    found: dict[nn.Module, None] = {}
    for callback in callbacks:
        for value in tree_leaves(list(vars(callback).values())):
            copy = copy_in(value, model) if isinstance(value, nn.Module) else None
            if copy is not None and copy is not model:
                found[copy] = None
    return list(found)


def lay_out_copies(copies: Sequence[nn.Module], model: nn.Module, device: torch.device) -> None:
    """Give copies of a model that are whole the model's layout; every rank calls it."""
    if len(set(nums := gather_numbers(len(copies)))) > 1:
        raise StepError(
            f"The callbacks hold different numbers of copies of {type(model).__name__} (by rank: {nums}), but each rank"
            " averages a part of it. Give every rank the same callbacks."
        )
    for copy in copies:
        _lay_out(copy, model, device)


def _lay_out(copy: nn.Module, model: nn.Module, device: torch.device) -> None:
    likes = {fqn: tensor for fqn, tensor, _ in named_state(model)}
    parts = marked(model)
    laid_out: dict[Tensor, Tensor] = {}
    for fqn, tensor, owner in list(named_state(copy)):
        if tensor not in laid_out:
            whole = of_rank(0, tensor, device).to(tensor.device)  # ranks differ if the model was built without a seed
            new = own_part(whole, likes[fqn], parts.get(fqn))
            if isinstance(tensor, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            vars(new).update(users_attributes(tensor))
            laid_out[tensor] = new
        put(owner, fqn.rpartition(".")[2], laid_out[tensor])
        if fqn in parts:
            mark(owner, fqn.rpartition(".")[2], parts[fqn])
