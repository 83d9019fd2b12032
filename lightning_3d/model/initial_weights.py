"""Making all ranks start from the same weights, and dropping what lies on other stages."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Mapping
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import PlanError
from lightning_3d.model.deferred import DeferredTensor, attributes, fingerprint, hash_of
from lightning_3d.torch_internals.modules import move_other_state, named_state, put


def check_same_model(module: nn.Module) -> None:
    """Check that names, shapes and dtypes are the same on all ranks, which every later collective relies on.

    Raises:
        PlanError: the ranks built different models, or a parameter or buffer is on the meta device; on all ranks.
    """
    state = _state(module)
    described = [
        f"{fqn} {tuple(tensor.shape)} {tensor.dtype}" + (" on the meta device" if tensor.is_meta else "")
        for tensor, fqn in state.items()
    ]
    sums = gather_numbers(zlib.crc32("\n".join(described).encode()))
    other = next((rank for rank, value in enumerate(sums) if value != sums[0]), None)
    if other is not None:
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, described)
        pairs = zip_longest(everyone[0], everyone[other], fillvalue="nothing")
        first, second = next(pair for pair in pairs if pair[0] != pair[1])
        raise PlanError(
            f"The ranks built different models: where rank 0 has {first}, rank {other} has {second}. Build the model"
            " from the same code and arguments on every rank."
        )
    if missing := [fqn for tensor, fqn in state.items() if tensor.is_meta]:
        raise PlanError(
            f"{len(missing)} parameters or buffers are on the meta device ({', '.join(missing[:3])}, ...): the model"
            " has no weights yet. Build it without torch.device('meta'): in configure_model and under"
            " trainer.init_module() a rank does not keep the weights of other pipeline stages anyway."
        )


def place_weights(
    module: nn.Module, holds: Callable[[str], bool], device: torch.device, parameters_on: torch.device | None = None
) -> None:
    """Give this stage its weights and buffers, the same as on rank 0, and put those of other stages on meta.

    The ranks differ if the model was built without a seed. Seeded ranks only exchange checksums.

    Args:
        module: Complete, on every rank.
        holds: Whether this stage holds a parameter or buffer, by its FQN.
        device: Where it goes.
        parameters_on: Where parameters go, if elsewhere.
    """
    state = _state(module)
    if len(set(gather_numbers(_checksum(state)))) > 1:
        _broadcast(state, holds, device)
    del state
    _replace(module, lambda fqn, tensor: tensor if holds(fqn) else _on_meta(tensor))
    computed = {fqn for tensor, fqn in _state(module).items() if isinstance(tensor, DeferredTensor)}
    elsewhere = parameters_on or device

    def moved(_: str, tensor: Tensor) -> Tensor:
        return _moved(tensor, elsewhere if isinstance(tensor, nn.Parameter) else device)

    _replace(module, moved)
    move_other_state(module, device)
    _agree({fqn: tensor for tensor, fqn in _state(module).items() if fqn in computed}, module, device)


def _state(module: nn.Module) -> dict[Tensor, str]:
    """Distinct parameters and buffers -> the last of their names."""
    return {tensor: fqn for fqn, tensor, _ in named_state(module)}


def _checksum(state: Mapping[Tensor, str]) -> int:
    deferred = [tensor for tensor in state if isinstance(tensor, DeferredTensor)]
    recorded = fingerprint([tensor.contents for tensor in deferred if tensor.contents is not None])
    present = [t for t in state if not isinstance(t, DeferredTensor)]
    present += [tensor.materialised() for tensor in deferred if tensor.contents is None]
    return zlib.crc32(repr([recorded, *map(hash_of, present)]).encode())


def _broadcast(state: Mapping[Tensor, str], holds: Callable[[str], bool], device: torch.device) -> None:
    """Take the data of rank 0, one tensor at a time."""
    for tensor, fqn in state.items():
        there = of_rank(0, tensor, device)
        if holds(fqn) and isinstance(tensor, DeferredTensor):
            tensor.replace_data(there)
        elif holds(fqn):
            tensor.detach().copy_(there)


def of_rank(source: int, tensor: Tensor, device: torch.device) -> Tensor:
    """The data of a tensor on another rank. Every rank calls it."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    if dist.get_rank() == source:
        there.copy_(tensor.computed() if isinstance(tensor, DeferredTensor) else tensor.detach())
    dist.broadcast(there, src=source)
    return there


def _agree(computed: Mapping[str, Tensor], module: nn.Module, device: torch.device) -> None:
    """Ranks of different hardware may compute different bits from the same record: take those of the lowest rank."""
    hashes = {fqn: hash_of(tensor) for fqn, tensor in computed.items()}
    everyone: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, hashes)
    for fqn in sorted(set().union(*everyone)):
        holders = [rank for rank, held in enumerate(everyone) if fqn in held]
        if len({everyone[rank][fqn] for rank in holders}) == 1:
            continue
        owner, _, name = fqn.rpartition(".")
        like = getattr(module.get_submodule(owner), name)
        there = of_rank(holders[0], like, device)
        if fqn in computed:
            like.detach().copy_(there)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Put buffers on a device before the step is traced, which computes there what only data and buffers go into.

    They are far smaller than the parameters, which stay where they are until each rank knows its own.
    """
    _replace(
        module,
        lambda _, tensor: tensor if isinstance(tensor, nn.Parameter | DeferredTensor) else _moved(tensor, device),
    )


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
    plain = tensor.plain() if isinstance(tensor, DeferredTensor) else tensor
    if plain.device == device or plain.is_meta:
        return plain
    there = plain.detach().to(device)
    if not isinstance(plain, nn.Parameter):
        return there
    gradient, plain.grad = plain.grad, None
    try:
        plain.data = there  # as torch's Module.to does: hooks, and whoever else has the parameter, keep it
    except RuntimeError:  # of another kind: tensors that wrap others, and devices that torch does not have itself
        return there
    plain.grad = None if gradient is None else gradient.to(device)
    return plain


def _replace(module: nn.Module, change: Callable[[str, Tensor], Tensor]) -> dict[Tensor, Tensor]:
    """Put ``change(fqn, tensor)`` in place of every parameter and buffer; returns what changed. Ties stay ties."""
    changed: dict[Tensor, Tensor] = {}
    for fqn, tensor, owner in list(named_state(module)):
        if tensor not in changed:
            new = change(fqn, tensor)
            if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, requires_grad=tensor.requires_grad)
            if new is not tensor:
                new.__dict__.update(attributes(tensor))
            changed[tensor] = new
        if changed[tensor] is not tensor:
            put(owner, fqn.rpartition(".")[2], changed[tensor])
    return {old: new for old, new in changed.items() if new is not old}
