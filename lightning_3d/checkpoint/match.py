"""Whether a checkpoint fits a model, its optimizers and schedulers: names, shapes and classes, before any is changed.

Pure. All ranks know the names and shapes of absent blocks, too, and so come to one result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.errors import CheckpointError

NUM_NAMED = 10
"""FQNs that a message lists before it counts the rest."""

_WRAPPED = ("optimizer", "base_optimizer", "optim")
"""Attributes in which wrappers keep the optimizer that they wrap."""


def check_model(
    found: Mapping[str, TensorInfo | None], wanted: Mapping[str, TensorInfo | None], *, strict: bool
) -> None:
    """Compare the model state in a checkpoint with that of a module, both by FQN (None: not a tensor).

    Dtypes may differ, as in torch: values are converted.

    Raises:
        CheckpointError: Shapes differ, or with `strict` there are missing or unexpected FQNs.

    """
    problems = [
        f"{fqn} has shape {_shape(found[fqn])} in the checkpoint and {_shape(info)} in the model"
        for fqn, info in wanted.items()
        if fqn in found and _shape(found[fqn]) != _shape(info)
    ]
    if strict:
        problems = [*_differences(found, wanted), *problems]
    if problems:
        raise CheckpointError(
            f"The checkpoint does not fit the model: {'; '.join(problems[:NUM_NAMED])}. Build the model as it was when "
            "the checkpoint was written" + (", or set strict_loading=False to load what matches" if strict else "")
        )


def check_is_lightning(checkpoint: object, path: str | os.PathLike[str]) -> None:
    """Refuse what no Trainer wrote, such as the state of a model alone.

    Raises:
        CheckpointError: It is none of Lightning's checkpoints.

    """
    if isinstance(checkpoint, Mapping) and "pytorch-lightning_version" in checkpoint:
        return
    keys = [str(key) for key in checkpoint] if isinstance(checkpoint, Mapping) else []
    content = f"its keys are {', '.join(keys[:NUM_NAMED])}" if keys else f"it holds a {type(checkpoint).__name__}"
    raise CheckpointError(
        f"{os.fspath(path)} is no checkpoint of Lightning, which have a 'pytorch-lightning_version' ({content}"
        f"{', ...' if len(keys) > NUM_NAMED else ''}). ckpt_path takes what a Trainer saved; weights alone go into the"
        " model before the run: model.load_state_dict(torch.load(path, weights_only=True))"
    )


def check_num_optimizers(num_found: int, num_wanted: int) -> None:
    """Compare the number of optimizer states in a checkpoint with that of the optimizers to restore.

    Raises:
        CheckpointError: They differ.

    """
    if num_found != num_wanted:
        hint = ": it was saved with save_weights_only=True" if num_found == 0 else ""
        raise CheckpointError(
            f"The checkpoint holds the states of {num_found} optimizers{hint}, but {num_wanted} are to be restored. "
            "Load it for evaluation, load the weights alone, or configure the optimizers that it was written with"
        )


def check_groups(
    found: Sequence[Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]], *, optimizer: int, strict: bool
) -> None:
    """Compare the parameter groups in a checkpoint with those of an optimizer, both with FQNs in "params".

    Args:
        found: Groups in the checkpoint.
        wanted: Groups of the optimizer.
        optimizer: Its index, for the message.
        strict: Whether the FQNs of each group must be the same.

    Raises:
        CheckpointError: The number of groups differs (hyperparameters could not be told apart), or with `strict` a
            group's FQNs differ.

    """
    what = f"The checkpoint does not fit optimizer {optimizer}"
    if len(found) != len(wanted):
        raise CheckpointError(
            f"{what}: it has {len(found)} parameter groups in the checkpoint and {len(wanted)} now. "
            "Configure the same groups"
        )
    for i, (there, here) in enumerate(zip(found, wanted, strict=True)):
        problems = _differences(there["params"], here["params"])
        if strict and problems:
            raise CheckpointError(
                f"{what}: in parameter group {i}, {'; '.join(problems)}. Configure the same groups, or set "
                "strict_loading=False to load what matches"
            )


def by_fqn(state: Mapping[str, Any], wanted: Sequence[Mapping[str, Any]], *, optimizer: int) -> dict[str, Any]:
    """An optimizer's state keyed by torch's indices, keyed by FQN instead.

    Args:
        state: `{"state": {index: {name: value}}, "param_groups": [{"params": [index, ...], ...}]}`; indices stand for
            positions, as in torch. One that is keyed by FQN (as Lightning's consolidation writes it) is returned so.
        wanted: Groups of the optimizer, with FQNs in "params".
        optimizer: Its index, for the message.

    Raises:
        CheckpointError: Numbers of groups or of parameters in a group differ.

    """
    groups = state["param_groups"]
    if any(isinstance(key, str) for group in groups for key in group["params"]):
        return {"state": state["state"], "param_groups": list(groups)}
    sizes, wanted_sizes = [len(group["params"]) for group in groups], [len(group["params"]) for group in wanted]
    if sizes != wanted_sizes:
        raise CheckpointError(
            f"The checkpoint does not fit optimizer {optimizer}: its parameter groups hold {sizes} parameters in the "
            f"checkpoint and {wanted_sizes} now. Configure the same groups over the same model"
        )
    fqn_of = {
        index: fqn
        for there, here in zip(groups, wanted, strict=True)
        for index, fqn in zip(there["params"], here["params"], strict=True)
    }
    return {
        "state": {fqn_of[key]: values for key, values in state["state"].items() if isinstance(key, int)},
        "param_groups": [{**there, "params": here["params"]} for there, here in zip(groups, wanted, strict=True)],
    }


def _differences(found: Iterable[str], wanted: Iterable[str]) -> list[str]:
    found, wanted = dict.fromkeys(found), dict.fromkeys(wanted)
    missing, unexpected = [fqn for fqn in wanted if fqn not in found], [fqn for fqn in found if fqn not in wanted]
    problems = [f"missing in the checkpoint: {_listed(missing)}"] if missing else []
    return problems + ([f"unexpected in the checkpoint: {_listed(unexpected)}"] if unexpected else [])


def _listed(fqns: Sequence[str]) -> str:
    rest = len(fqns) - NUM_NAMED
    return ", ".join(fqns[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _shape(info: TensorInfo | None) -> tuple[int, ...] | None:
    return None if info is None else info.shape


# -------------------------------------------------------------------------------------------------------------- classes


def class_names(thing: object) -> list[str]:
    """The names by which the class of an optimizer or scheduler is known, also that which it wraps."""
    names = [_name(type(thing))]
    inner = next((vars(thing)[name] for name in _WRAPPED if isinstance(vars(thing).get(name), Optimizer)), None)
    if isinstance(thing, Optimizer) and inner is not None and inner is not thing:
        names += class_names(inner)
    return names


def check_classes(
    names: Mapping[str, Sequence[Sequence[str]]],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    *,
    strict: bool,
) -> None:
    """Compare optimizers and schedulers with those whose saved states they are to get.

    States of other classes may have the same names and shapes (AdamW, RAdam), and would go on silently as something
    else. Checkpoints of plain Trainers name no classes, and are loaded as a plain Trainer does.

    Args:
        names: The saved names of classes under "optimizers" and "schedulers", if there are any.
        optimizers: Those that get states.
        schedulers: The same.
        strict: Whether differences raise; else they are warned of.

    Raises:
        CheckpointError: Of another class.
    """
    problems = [
        f"{kind} {i} is {' in '.join(class_names(thing))} now, and {' in '.join(saved)} in the checkpoint"
        for kind, things in (("optimizer", optimizers), ("scheduler", schedulers))
        for i, (thing, saved) in enumerate(zip(things, names.get(f"{kind}s", ()), strict=False))
        if _without_modules(saved).isdisjoint(_without_modules(class_names(thing)))
    ]
    if not problems:
        return
    message = f"The checkpoint has states of other classes: {'; '.join(problems)}."
    if strict:
        raise CheckpointError(
            f"{message} Configure those that it was written with; or let them begin anew, by `optimizer_states` and"
            " `lr_schedulers` that on_load_checkpoint sets to []; or set strict_loading=False to load their states all"
            " the same"
        )
    rank_zero_warn(f"{message} They are loaded all the same, as strict_loading is False.")


def check_num_schedulers(num_found: int, num_wanted: int) -> None:
    """Compare the number of schedulers in a checkpoint with that of those to restore; none in it begins them anew.

    Raises:
        CheckpointError: They differ.
    """
    if num_found not in (0, num_wanted):
        raise CheckpointError(
            f"The checkpoint holds the states of {num_found} learning-rate schedulers, but {num_wanted} are to be"
            " restored. Configure those that it was written with, or set checkpoint['lr_schedulers'] = [] in"
            " on_load_checkpoint to let them begin anew"
        )


def _name(cls: type[Any]) -> str:
    """A class that is derived from one of torch's goes by the name of that one."""
    bases = ("Optimizer", "LRScheduler", "_LRScheduler")
    of_torch = (
        base for base in cls.__mro__ if base.__module__.startswith("torch.optim") and base.__name__ not in bases
    )
    known = next(of_torch, cls)
    return f"{known.__module__}.{known.__qualname__}"


def _without_modules(names: Sequence[str]) -> set[str]:
    """Names of classes alone: a script's module has another name when it is imported."""
    return {name.rpartition(".")[2] for name in names}
