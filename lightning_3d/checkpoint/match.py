"""Whether a checkpoint fits a model and its optimizers: names, shapes and groups, before any is changed.

Pure. All ranks know the names and shapes of absent blocks, too, and so come to one result.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_3d.checkpoint.box import TensorInfo
from lightning_3d.errors import CheckpointError

NUM_NAMED = 10
"""FQNs that a message lists before it counts the rest."""


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
    metadata = len(fqns) - NUM_NAMED
    return ", ".join(fqns[:NUM_NAMED]) + (f" and {metadata} more" if metadata > 0 else "")


def _shape(info: TensorInfo | None) -> tuple[int, ...] | None:
    return None if info is None else info.shape
