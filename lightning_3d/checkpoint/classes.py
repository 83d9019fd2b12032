"""Whether a checkpoint has the states of the optimizers and schedulers that are to be restored, or of other classes.

States of other classes may have the same names and shapes (AdamW, RAdam), and would go on silently as something else.
So checkpoints have the names of the classes; those of plain Trainers have none, and are loaded as a plain Trainer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.tuner import lr_finder
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_3d.errors import CheckpointError

_WRAPPED = ("optimizer", "base_optimizer", "optim")
"""Attributes in which wrappers keep the optimizer that they wrap."""


def class_names(thing: object) -> list[str]:
    """The names by which the class of an optimizer or scheduler is known, also that which it wraps."""
    names = [_name(type(thing))]
    inner = next((vars(thing)[name] for name in _WRAPPED if isinstance(vars(thing).get(name), Optimizer)), None)
    if isinstance(thing, Optimizer) and inner is not None and inner is not thing:
        names += class_names(inner)
    return names


def is_of_lr_finder(scheduler: object) -> bool:
    """Whether Lightning's finder of learning rates has put it in place of the user's."""
    return type(scheduler).__module__ == lr_finder.__name__


def check_classes(
    names: Mapping[str, Sequence[Sequence[str]]],
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    *,
    strict: bool,
) -> None:
    """Compare optimizers and schedulers with those whose saved states they are to get.

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
