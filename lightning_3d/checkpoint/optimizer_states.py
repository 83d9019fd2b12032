"""The states of optimizers: this rank's part of them, keyed by FQN.

In a file they are full and keyed by torch's indices. The state of a parameter that one data-parallel rank owns is there
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import empty_state
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.lazy import LazyTensor, info_of, made, take
from lightning_3d.checkpoint.match import by_fqn, check_groups, check_num_optimizers
from lightning_3d.checkpoint.saved_state import unread
from lightning_3d.checkpoint.share import state_share
from lightning_3d.errors import CheckpointError
from lightning_3d.tensor.placement import Parts, marked
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.zero.gathered import reshard_units
from lightning_3d.zero.shard import NO_SHARDS, RankShard, Shards, plain


def load_optimizers(
    states: Sequence[Mapping[str, Any]],
    module: nn.Module,
    optimizers: Sequence[Optimizer | LightningOptimizer],
    *,
    strict: bool,
    shards: Shards = NO_SHARDS,
) -> None:
    """Give optimizers this rank's part of saved states; a collective of all ranks.

    Args:
        states: `{"state": {key: {name: value}}, "param_groups": [{"params": [key, ...], ...}]}` of each, in the order
            of `optimizers`; keys are torch's indices or FQNs.
        module: The whole module; blocks of other stages are on the meta device.
        strict: Whether the FQNs of each group must be the same.
        shards: As in `optimizer_state`.

    Raises:
        CheckpointError: They do not fit, or can't be read; on all ranks, before any optimizer is changed.

    """
    loaded: list[tuple[Optimizer | LightningOptimizer, dict[str, Any]]] = []
    parts = marked(module)
    with failing_alike("load the states of optimizers"):
        check_num_optimizers(len(states), len(optimizers))
        for i, optimizer in enumerate(optimizers):
            if has_no_parameters(optimizer):
                continue
            groups = optimizer_state(module, optimizer)["param_groups"]
            saved = by_fqn(states[i], groups, optimizer=i)
            check_groups(saved["param_groups"], groups, optimizer=i, strict=strict)
            state, own = unread(saved["state"]), dict[str, dict[str, Any]]()
            for fqn, parameter in stepped_parameters(module, optimizer, shards).items():
                if fqn in state:
                    values = state[fqn].items()
                    own[fqn] = {name: _part_of(value, parameter, shards, parts.get(fqn)) for name, value in values}
            loaded.append((optimizer, {"state": own, "param_groups": saved["param_groups"]}))
    for optimizer, part in loaded:
        restore_optimizer(module, optimizer, part, shards)


def _part_of(value: Any, parameter: nn.Parameter, shards: Shards, parts: Parts | None) -> Any:
    if not isinstance(value, Tensor | LazyTensor):
        return tree_map_only(Tensor, Tensor.clone, made(value))  # of parameters that this rank steps whole
    info = info_of(value)
    assert info is not None
    part = state_share(empty_state(parameter, info, shards), parts)
    take(part, value)
    return part.tensor


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def has_no_parameters(optimizer: Optimizer | LightningOptimizer) -> bool:
    """Whether it stands for an optimizer that the user's ``configure_optimizers`` did not give, and has no states."""
    return not unwrapped(optimizer).param_groups


def optimizer_state(
    module: nn.Module, optimizer: Optimizer | LightningOptimizer, shards: Shards = NO_SHARDS
) -> dict[str, Any]:
    """The optimizer's state of the parameters that this rank holds, without copies.

    Args:
        shards: Parameter -> the plain part of it that the optimizer's state is of, where it is not of the parameter.

    Returns:
        `{"state": {fqn: {name: value}}, "param_groups": [{"params": [fqn, ...], "lr": ..., ...}]}`. The groups are the
        same on all ranks; a tied parameter goes by its first FQN.

    Raises:
        CheckpointError: A parameter of the optimizer is not in `module`, or a state can't be saved.

    """
    if has_no_parameters(optimizer):
        return {"state": {}, "param_groups": []}
    fqns = parameter_fqns(module, optimizer)
    parameters = list(parameters_of(optimizer))
    packed = unwrapped(optimizer).state_dict()
    strange = [key for key in packed["state"] if not isinstance(key, int)]
    if strange:
        rank_zero_warn(
            f"{type(unwrapped(optimizer)).__name__} keeps state of {len(strange)} things that are no parameters (the"
            f" first is a {type(strange[0]).__name__}), which checkpoints leave out: torch would not restore it, as it"
            " finds states by parameter. Keep it under a parameter in the optimizer's state"
        )
    numbered = {key: values for key, values in packed["state"].items() if isinstance(key, int)}
    state = {fqns[i]: values for i, values in sorted(numbered.items()) if not parameters[i].is_meta and values}
    of_shards = {fqn: shards[parameter] for fqn, parameter in zip(fqns, parameters, strict=True) if parameter in shards}
    in_parts = {fqn for fqn, parameter in zip(fqns, parameters, strict=True) if isinstance(parameter, DTensor)}
    in_parts |= {fqn for fqn, shard in of_shards.items() if shard.is_dealt}
    for fqn, values in state.items():
        for name, value in values.items():
            holds_more = isinstance(value, dict | list) or (
                isinstance(value, tuple) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
            )
            if fqn in in_parts and holds_more:
                raise CheckpointError(
                    f"state {name!r} of {fqn} in {type(unwrapped(optimizer)).__name__} is a {type(value).__name__}, and"
                    " this rank steps a part of that parameter: there only states that are tensors and plain values can"
                    " be saved. Use tensor_parallel_size=1 and zero.stage=0, or set Trainer(enable_checkpointing=False)"
                )
    apart = _apart(state, of_shards)
    placed = {
        fqn: _placed(values, of_shards[fqn], apart) if fqn in of_shards else values for fqn, values in state.items()
    }
    groups = [{**group, "params": [fqns[i] for i in group["params"]]} for group in packed["param_groups"]]
    return {"state": placed, "param_groups": groups}


def _apart(state: Mapping[str, Mapping[str, Any]], of_shards: Mapping[str, RankShard]) -> set[str]:
    """Names of states that are no rows of their parameters, though a shard's rows may have their shape by chance."""
    return {
        name
        for fqn, shard in of_shards.items()
        for name, value in state.get(fqn, {}).items()
        if isinstance(value, Tensor) and value.shape != shard.own(shard.parameter).shape
    }


def _placed(values: Mapping[str, Any], shard: RankShard, apart: Collection[str]) -> dict[str, Any]:
    return {
        name: shard.like_parameter(value) if isinstance(value, Tensor) and name not in apart else value
        for name, value in values.items()
    }


def restore_optimizer(
    module: nn.Module,
    optimizer: Optimizer | LightningOptimizer,
    state: dict[str, Any],
    shards: Shards = NO_SHARDS,
) -> None:
    """Give `optimizer` the states and hyperparameters in `state`, in the form that `optimizer_state` returns.

    Groups are matched by position; their parameters stay those of `optimizer`, whatever `state` lists.
    """
    index = {fqn: i for i, fqn in enumerate(parameter_fqns(module, optimizer))}
    parameters = list(parameters_of(optimizer))
    current = unwrapped(optimizer).state_dict()["param_groups"]
    saved = state["param_groups"]
    own: dict[int, Mapping[str, Any]] = {}
    for fqn, values in state["state"].items():
        is_of_shard = parameters[index[fqn]] in shards
        own[index[fqn]] = {name: plain(v) if is_of_shard and isinstance(v, Tensor) else v for name, v in values.items()}
    unwrapped(optimizer).load_state_dict(
        {
            "state": own,
            "param_groups": [{**s, "params": c["params"]} for s, c in zip(saved, current, strict=True)],
        }
    )


def stepped_parameters(
    module: nn.Module, optimizer: Optimizer | LightningOptimizer, shards: Shards
) -> dict[str, nn.Parameter]:
    """The parameters of `optimizer` whose state this rank has, or a part of it, by first FQN."""
    named = zip(parameter_fqns(module, optimizer), parameters_of(optimizer), strict=True)
    return {
        fqn: parameter
        for fqn, parameter in named
        if not (parameter.is_meta or (parameter in shards and shards[parameter].is_elsewhere))
    }


def parameters_of(optimizer: Optimizer | LightningOptimizer) -> Iterator[nn.Parameter]:
    """The parameters of all groups, in the order of torch's indices."""
    for group in unwrapped(optimizer).param_groups:
        yield from group["params"]


def parameter_fqns(module: nn.Module, optimizer: Optimizer | LightningOptimizer) -> list[str]:
    """The first FQN of every parameter of `optimizer`, in the order of torch's indices.

    Raises:
        CheckpointError: A parameter is not in `module`.

    """
    reshard_units(module)
    fqn_of = {parameter: fqn for fqn, parameter in module.named_parameters()}
    fqns = [fqn_of.get(parameter) for parameter in parameters_of(optimizer)]
    strays = [i for i, fqn in enumerate(fqns) if fqn is None]
    if strays:
        raise CheckpointError(
            f"parameters {strays} of {type(unwrapped(optimizer)).__name__} are not parameters of "
            f"{type(module).__name__}, so they have no name in a checkpoint: register them on the module"
        )
    return [fqn for fqn in fqns if fqn is not None]
