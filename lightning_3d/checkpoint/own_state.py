"""The state that this rank holds, by FQN: that of its own blocks, in whatever placement, and nothing of absent blocks.

Parameters and buffers of blocks on other pipeline ranks are on the meta device. Their names, shapes and order are known
here, so every rank sees the same list of FQNs; their values, and optimizer state that belongs to them, are left out.

Of a value that several pipeline ranks hold the lowest one provides it: tied parameters and parameters of glue are equal
there but perhaps placed differently, so that two ranks writing their parts of it would not fit together. The state of a
parameter that one data-parallel rank owns is there alone.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from contextvars import ContextVar
from copy import copy
from itertools import chain
from typing import Any, TypeVar

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import fill, full_value, is_part
from lightning_3d.checkpoint.share import Share, shares, tensor_of
from lightning_3d.errors import CheckpointError
from lightning_3d.tensor.placement import marked
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.gathered import reshard_units
from lightning_3d.zero.shard import NO_SHARDS, RankShard, Shards, plain

Key = TypeVar("Key", bound=Hashable)


expects_parts: ContextVar[bool] = ContextVar("expects_parts", default=False)
"""Whether the code that calls ``state_dict()`` knows that it gets parts."""


def state_of(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` for code that knows that it has this rank's parts."""
    token = expects_parts.set(True)
    try:
        return module.state_dict()
    finally:
        expects_parts.reset(token)


def like_state(state: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by FQN in the form of ``module.state_dict()``, an OrderedDict that tells versions of modules, too."""
    formed = copy(state)
    formed.clear()
    formed.update(values)
    return formed


def model_state(module: nn.Module) -> dict[str, Any]:
    """`module.state_dict()` without what is absent; tensors are aliases of the parameters, DTensors stay DTensors."""
    state = state_of(module)
    held = held_names(state)
    return {fqn: value for fqn, value in state.items() if fqn in held}


def model_shares(module: nn.Module) -> dict[str, Any]:
    """The same, with the shares of tensors in place of these."""
    return shares(model_state(module), marked(module))


def held_names(state: Mapping[str, Any]) -> set[str]:
    """Names of what this rank holds of a model's state."""
    present = {fqn: not value.is_meta for fqn, value in state.items() if isinstance(value, Tensor)}
    for fqn in state.keys() - present.keys():
        # Extra state belongs to the pipeline ranks that hold some of the tensors in its module, if there are any.
        owner = fqn.removesuffix(fqn.rpartition(".")[2])
        tensors = [is_present for other, is_present in present.items() if other.startswith(owner)]
        present[fqn] = any(tensors) or not tensors
    return {fqn for fqn, is_present in present.items() if is_present}


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


def filled_from(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The shares in `own`, made by `model_shares`, filled from tensors of the same names; and other values.

    Args:
        given: Whole tensors, or shards as the module itself has them, of which the ranks that hold them have theirs.
    """
    matching = {fqn: value for fqn, value in own.items() if fqn in given}
    for fqn, value in matching.items():
        if isinstance(value, Share):
            fill(value.tensor, full_value(given[fqn]), None if is_part(given[fqn]) else value.parts)
        else:
            matching[fqn] = given[fqn]
    return matching


def restore_model(module: nn.Module, state: dict[str, Any]) -> None:
    """Give `module` the values in `state`, made by `model_shares` and filled since; absent FQNs stay as they are.

    Tensors alias the parameters, so this moves no other data; it runs the module's hooks and sets extra state.
    """
    module.load_state_dict({fqn: tensor_of(value) for fqn, value in state.items()}, strict=False)


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


def tied_fqns(module: nn.Module) -> dict[str, str]:
    """The first FQN of every parameter and buffer that has several, by its other FQNs."""
    first: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for fqn, tensor in chain(parameters, module.named_buffers(remove_duplicate=False)):
        if first.setdefault(tensor, fqn) != fqn:
            tied[fqn] = first[tensor]
    return tied


def unwrapped(optimizer: Optimizer | LightningOptimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
