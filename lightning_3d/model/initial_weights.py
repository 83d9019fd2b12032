"""Making all ranks start from the same weights, and dropping what lies on other stages."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.distributed.agreement import described_alike, gather_numbers, gather_objects
from lightning_3d.errors import PlanError
from lightning_3d.model.absent import AbsentTensor
from lightning_3d.model.unbuilt import UnbuiltTensor
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.modules import move_other_state, named_state, put
from lightning_3d.zero.attributes import users_attributes


def is_on_meta(module: nn.Module) -> bool:
    """Whether the author built a module, or some of it, on the meta device."""
    return any(tensor.is_meta and not isinstance(tensor, AbsentTensor) for tensor in _state(module))


def check_same_model(module: nn.Module, *, is_restored: bool) -> None:
    """Check that names, shapes and dtypes are the same on all ranks, which every later collective relies on.

    Args:
        is_restored: Whether a checkpoint will be loaded into the model.

    Raises:
        PlanError: the ranks built different models, or a parameter or buffer is on the meta device, and no checkpoint
            will give it values; on all ranks.
    """
    state = _state(module)
    described = [
        f"{fqn} {tuple(tensor.shape)} {tensor.dtype}" + (" on the meta device" if tensor.is_meta else "")
        for tensor, fqn in state.items()
    ]
    sums = gather_numbers(zlib.crc32("\n".join(described).encode()))
    other = next((rank for rank, value in enumerate(sums) if value != sums[0]), None)
    if other is not None:
        everyone = gather_objects(described)
        pairs = zip_longest(everyone[0], everyone[other], fillvalue="nothing")
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise PlanError(
            f"The ranks built different models: where rank 0 has {first}, rank {other} has {second}. Build the model"
            " from the same code and arguments on every rank."
        )
    if not (missing := [fqn for tensor, fqn in state.items() if tensor.is_meta]):
        return
    if not is_restored:
        raise PlanError(
            f"{len(missing)} parameters or buffers are on the meta device ({', '.join(missing[:3])}, ...): the model"
            " has no weights yet. Restore it from a checkpoint by the argument ckpt_path, a path, of which each rank"
            " reads its own part; or build it without torch.device('meta'), in configure_model or under"
            " trainer.init_module(), where with a pipeline no rank but the first holds weights of other stages."
        )
    if unsaved := [fqn for fqn in missing if fqn not in module.state_dict()]:
        raise PlanError(
            f"{len(unsaved)} buffers are on the meta device with persistent=False ({', '.join(unsaved[:3])}, ...), so"
            " that no checkpoint has them. Compute them outside of torch.device('meta')."
        )


def place_weights(
    module: nn.Module, holds: Callable[[str], bool], device: torch.device, parameters_on: torch.device | None = None
) -> None:
    """Give this stage its weights and buffers, the same as on rank 0, and put those of other stages on meta.

    Rank 0 sends its own, one at a time, as others may lack some, or have others without a seed. Those that the author
    built on meta get memory for a checkpoint. Caches that not all ranks have alike stay each rank's own.

    Args:
        module: Complete, on every rank.
        holds: Whether this stage holds a parameter or buffer, by its FQN.
        device: Where it goes.
        parameters_on: Where parameters go, if elsewhere.
    """
    sent = set[str]()
    if dist.get_world_size() > 1:
        given = {fqn: tensor for fqn, tensor, _ in named_state(module) if not tensor.is_meta}
        sent = described_alike({fqn: f"{tuple(tensor.shape)} {tensor.dtype}" for fqn, tensor in given.items()})

    def placed(fqn: str, tensor: Tensor) -> Tensor:
        goes_to = parameters_on or device if isinstance(tensor, nn.Parameter) else device
        values = of_rank(0, tensor, device) if fqn in sent else None
        if not holds(fqn):
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        if tensor.is_meta:
            return torch.empty_like(tensor, device=goes_to)
        return _moved(tensor if values is None else _filled(tensor, values.to(goes_to)), goes_to)

    _replace(module, placed)
    move_other_state(module, device)


def _state(module: nn.Module) -> dict[Tensor, str]:
    """Distinct parameters and buffers -> the last of their names."""
    return {tensor: fqn for fqn, tensor, _ in named_state(module)}


def of_rank(source: int, tensor: Tensor, device: torch.device) -> Tensor:
    """The data of a tensor on another rank. Every rank calls it."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_rank() == source:
        there.copy_(tensor.detach())
    dist.broadcast(there.view(-1).view(torch.uint8), src=source)  # no backend knows all dtypes
    return there


def _filled(tensor: Tensor, values: Tensor) -> Tensor:
    """The tensor with other values; another one in place of one that was built without."""
    if isinstance(tensor, UnbuiltTensor):
        with DisableTorchFunctionSubclass():
            return torch.empty_like(tensor, device=values.device, requires_grad=False).copy_(values)
    tensor.detach().copy_(values)
    return tensor


def place_buffers(module: nn.Module, device: torch.device) -> None:
    """Put buffers on a device before the step is traced, which computes there what only data and buffers go into.

    They are far smaller than the parameters, which stay where they are until each rank knows its own. Rank 0 sends
    those that were computed from parameters that others lack; those on meta, which a checkpoint will fill, are zeros.
    """
    is_sent = any(gather_numbers(sum(isinstance(buffer, UnbuiltTensor) for buffer in module.buffers())))

    def placed(_: str, tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        if tensor.is_meta:
            return torch.zeros_like(tensor, device=device)
        return _moved(_filled(tensor, of_rank(0, tensor, device)) if is_sent else tensor, device)

    _replace(module, placed)


def move_parameters(module: nn.Module, parameters: Collection[Tensor], device: torch.device) -> dict[Tensor, Tensor]:
    """Put parameters of a module on a device, wherever it has them; ties stay ties.

    Returns:
        Each one that could not be given other data -> the new one in its place.
    """
    if all(parameter.device == device or parameter.is_meta for parameter in parameters):
        return {}
    return _replace(module, lambda _, tensor: _moved(tensor, device) if tensor in parameters else tensor)


def put_back(module: nn.Module, moved: Mapping[Tensor, Tensor]) -> None:
    """Undo ``move_parameters``, which returned this."""
    before = {new: old for old, new in moved.items()}
    _replace(module, lambda _, tensor: before.get(tensor, tensor))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor to put in its place: the parameter itself, which gets its data there, or a new one."""
    if tensor.device == device or tensor.is_meta:
        return tensor
    there = tensor.detach().to(device)
    if not isinstance(tensor, nn.Parameter):
        return there
    gradient, tensor.grad = tensor.grad, None
    try:
        tensor.data = there  # as torch's Module.to does: hooks, and whoever else has the parameter, keep it
    except RuntimeError:  # of another kind: tensors that wrap others, and devices that torch does not have itself
        return there
    tensor.grad = None if gradient is None else gradient.to(device)
    return tensor


def _replace(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """Put ``change(fqn, tensor)`` in place of every parameter and buffer; returns what changed. Ties stay ties."""
    changed: dict[Tensor, Tensor] = {}
    for fqn, tensor, owner in list(named_state(module)):
        if tensor not in changed:
            new = change(fqn, tensor)
            if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            if new is not tensor:
                vars(new).update(users_attributes(tensor))
            changed[tensor] = new
        if changed[tensor] is not tensor:
            put(owner, fqn.rpartition(".")[2], changed[tensor])
    return {old: new for old, new in changed.items() if new is not old}
