"""The states of optimizers: this rank's part of them, keyed by FQN.

In a file they are full and keyed by torch's indices. The state of a parameter that one data-parallel rank owns is there
alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import TensorInfo, state_share
from lightning_3d.checkpoint.collective_errors import collective_errors
from lightning_3d.checkpoint.lazy import LazyTensor, info_of, made, take, unread
from lightning_3d.checkpoint.match import by_fqn, check_groups, check_num_optimizers
from lightning_3d.errors import CheckpointError
from lightning_3d.sharding.placement import InterleavedShard, interleaved_parameters
from lightning_3d.torch_internals.fsdp_units import reshard_units
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map, tree_map_only
from lightning_3d.zero.optimizer_kind import missing_when_resumed
from lightning_3d.zero.shard import NO_SHARDS, RankShard, Shards, plain, shard_of


def load_optimizers(
    states: Sequence[Mapping[str, Any]],
    module: nn.Module,
    optimizers: Sequence[Optimizer | LightningOptimizer],
    *,
    strict: bool,
    shards: Shards = NO_SHARDS,
    saved_as: Sequence[str] = (),
) -> None:
    """Give optimizers this rank's part of saved states; a collective of all ranks.

    Args:
        states: `{"state": {key: {name: value}}, "param_groups": [{"params": [key, ...], ...}]}` of each, in the order
            of `optimizers`; keys are torch's indices or FQNs.
        module: The whole module; blocks of other stages are on the meta device.
        strict: Whether the FQNs of each group must be the same.
        shards: As in `optimizer_state`.
        saved_as: The classes of the optimizers that were saved, where the checkpoint tells them.

    Raises:
        CheckpointError: They do not fit, or can't be read; on all ranks, before any optimizer is changed.
    """
    loaded: list[tuple[Optimizer, dict[str, object]]] = []
    all_parts = interleaved_parameters(module)
    with collective_errors("load the states of optimizers"):
        check_num_optimizers(len(states), len(optimizers))
        for i, optimizer in enumerate(map(unwrapped, optimizers)):
            if has_no_parameters(optimizer):
                continue
            named, current = named_parameters(module, optimizer), optimizer.state_dict()["param_groups"]
            groups = _with_fqns(current, named)
            saved = by_fqn(states[i], groups, optimizer=i)
            check_groups(saved["param_groups"], groups, optimizer=i, strict=strict)
            state, own = unread(saved["state"]), dict[int, dict[str, object]]()
            parameters, kind = dict(named), saved_as[i] if saved_as else ""
            for group in saved["param_groups"]:
                _check_kind(optimizer, group, state, parameters, number=i, saved_as=kind)
            for number, (fqn, parameter) in enumerate(named):
                if fqn in state and _is_stepped(parameter, shards):
                    own[number] = {
                        name: _part_of(value, parameter, shards, all_parts.get(fqn))
                        for name, value in state[fqn].items()
                    }
            pairs = zip(saved["param_groups"], current, strict=True)
            in_order = [{**there, "params": here["params"]} for there, here in pairs]
            loaded.append((optimizer, {"state": own, "param_groups": in_order}))
    for optimizer, part in loaded:
        optimizer.load_state_dict(part)


def _is_stepped(parameter: nn.Parameter, shards: Shards) -> bool:
    """Whether this rank steps something of it, and has states of that."""
    return not shards[parameter].owned_by_other if parameter in shards else not parameter.is_meta


def _check_kind(
    optimizer: Optimizer,
    group: Mapping[str, Any],
    state: Mapping[str, object],
    parameters: Mapping[str, nn.Parameter],
    *,
    number: int,
    saved_as: str,
) -> None:
    """Check that an optimizer of this class can go on from a saved group, by a step of its smallest parameter.

    Raises:
        CheckpointError: It was saved of another class, which keeps other states or settings.
    """
    known = [fqn for fqn in group["params"] if fqn in parameters]
    if not known:
        return
    fqn = min(known, key=lambda fqn: (not state.get(fqn), parameters[fqn].numel()))
    like = nn.Parameter(torch.zeros(parameters[fqn].shape, dtype=parameters[fqn].dtype))
    values = tree_map(_zeros, state.get(fqn, {}))
    if (missing := missing_when_resumed(optimizer, {**group, "params": [like]}, values)) is None:
        return
    kind = saved_as or f"another kind, which keeps {', '.join(map(str, values)) or 'no states'}"
    raise CheckpointError(
        f"The checkpoint does not fit optimizer {number}: it was saved of {kind}, and this one is"
        f" {type(optimizer).__name__}, which needs {missing}. Configure the optimizer that it was written with; or, for"
        " one that is to begin anew, set optimizer_states and lr_schedulers to [] in on_load_checkpoint"
    )


def _zeros(value: object) -> object:
    info = info_of(value)
    return value if info is None else torch.zeros(info.shape, dtype=info.dtype)


def _part_of(value: object, parameter: nn.Parameter, shards: Shards, parts: InterleavedShard | None) -> object:
    if not isinstance(value, Tensor | LazyTensor):
        return tree_map_only(Tensor, Tensor.clone, made(value))  # of parameters that this rank steps whole
    info = info_of(value)
    assert info is not None
    part = state_share(_empty_state(parameter, info, shard_of(parameter, shards)), parts)
    take(part, value)
    return plain(part.tensor) if parameter in shards else part.tensor


def _empty_state(parameter: nn.Parameter, info: TensorInfo, shard: RankShard) -> Tensor:
    """Room for a state of `parameter`: placed as its shard is if it has its shape, else a plain tensor.

    Raises:
        CheckpointError: The parameter is sharded and the shape of the state is neither its own nor a scalar's.
    """
    if info.shape == tuple(parameter.shape):
        return shard.like_parameter(shard.empty_state(info.dtype))
    if math.prod(info.shape) == 1:  # a step count; torch moves it off the CPU where it has to be elsewhere
        return torch.empty(info.shape, dtype=info.dtype)
    if shard.steps_part:
        raise CheckpointError(
            f"an optimizer state of shape {info.shape} belongs to a sharded parameter of shape "
            f"{tuple(parameter.shape)}: only states of the parameter's shape and scalars can be sharded"
        )
    return torch.empty(info.shape, dtype=info.dtype, device=parameter.device)


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def has_no_parameters(optimizer: Optimizer) -> bool:
    """Whether it stands for an optimizer that the user's ``configure_optimizers`` did not give, and has no states."""
    return not optimizer.param_groups


def optimizer_state(
    module: nn.Module, optimizer: Optimizer | LightningOptimizer, shards: Shards = NO_SHARDS
) -> dict[str, object]:
    """The optimizer's state of the parameters that this rank holds, without copies.

    Args:
        shards: Parameter -> the plain part of it that the optimizer's state is of, where it is not of the parameter.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}]}`. The groups are the
        same on all ranks; a tied parameter goes by its first FQN.

    Raises:
        CheckpointError: A parameter of the optimizer is not in `module`, or a state can't be saved.
    """
    optimizer = unwrapped(optimizer)
    if has_no_parameters(optimizer):
        return {"state": {}, "param_groups": []}
    named, packed, kind = named_parameters(module, optimizer), optimizer.state_dict(), type(optimizer).__name__
    if strange := [key for key in packed["state"] if not isinstance(key, int)]:
        rank_zero_warn(
            f"{kind} keeps state of {len(strange)} things that are no parameters (the first is a"
            f" {type(strange[0]).__name__}), which checkpoints leave out: torch would not restore it, as it finds"
            " states by parameter. Keep it under a parameter in the optimizer's state"
        )
    held = [
        (fqn, parameter, packed["state"][number])
        for number, (fqn, parameter) in enumerate(named)
        if packed["state"].get(number) and not parameter.is_meta
    ]
    # Names of states that are no rows of their parameters, though some may have their shape by chance.
    apart, parts = set[str](), interleaved_parameters(module)
    for fqn, parameter, values in held:
        shard = shard_of(parameter, shards)
        for name, value in values.items():
            if isinstance(value, Tensor):
                if parameter in shards and value.shape != shard.stepped_shape:
                    apart.add(name)
                    if fqn in parts and shard.steps_part and value.numel() > 1:
                        raise CheckpointError(
                            f"state {name!r} of {fqn} has shape {tuple(value.shape)}: of a weight that is sharded in"
                            f" parts of {parts[fqn].sizes} features, only states of the weight's own shape can be saved"
                        )
            elif shard.steps_part and _holds_more(value):
                raise CheckpointError(
                    f"state {name!r} of {fqn} in {kind} is a {type(value).__name__}, and this rank steps a part of that"
                    " parameter: there only states that are tensors and plain values can be saved. Use"
                    " tensor_parallel_size=1 and zero.stage=0, or set Trainer(enable_checkpointing=False)"
                )
    state = {
        fqn: {
            name: shards[parameter].like_parameter(value)
            if parameter in shards and isinstance(value, Tensor) and name not in apart
            else value
            for name, value in values.items()
        }
        for fqn, parameter, values in held
    }
    return {"state": state, "param_groups": _with_fqns(packed["param_groups"], named)}


def _holds_more(value: object) -> bool:
    if isinstance(value, tuple):
        return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
    return isinstance(value, dict | list)


def _with_fqns(groups: Sequence[Mapping[str, Any]], named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [{**group, "params": [named[number][0] for number in group["params"]]} for group in groups]


def named_parameters(module: nn.Module, optimizer: Optimizer) -> list[tuple[str, nn.Parameter]]:
    """The parameters of all groups with their first FQNs, in the order of torch's indices.

    Raises:
        CheckpointError: A parameter is not in `module`.
    """
    reshard_units(module)
    fqn_of = {parameter: fqn for fqn, parameter in module.named_parameters()}
    parameters = list(parameters_of(optimizer))
    if strays := [i for i, parameter in enumerate(parameters) if parameter not in fqn_of]:
        raise CheckpointError(
            f"parameters {strays} of {type(optimizer).__name__} are not parameters of {type(module).__name__}, so they"
            " have no name in a checkpoint: register them on the module"
        )
    return [(fqn_of[parameter], parameter) for parameter in parameters]


def parameters_of(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    """The parameters of all groups, in the order of torch's indices."""
    for group in optimizer.param_groups:
        yield from group["params"]
