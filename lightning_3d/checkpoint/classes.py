"""Whether a checkpoint has the states of the optimizers and schedulers that are to be restored, or of other classes.

States of other classes may have the same names and shapes (AdamW, RAdam), and would go on silently as something else.
So checkpoints have the names of the classes. In those without, of plain Trainers, the settings in the parameter groups
tell apart most optimizers of torch, and the settings in their states its schedulers.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.tuner import lr_finder
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_3d.checkpoint.own_state import unwrapped
from lightning_3d.errors import CheckpointError

_COMMON = {"params", "lr", "foreach", "maximize", "capturable", "differentiable", "fused", "decoupled_weight_decay"}
"""Settings that say how, or belong to many, and that versions of torch add."""

_WRAPPED = ("optimizer", "base_optimizer", "optim")
"""Attributes in which wrappers keep the optimizer that they wrap."""


def class_names(thing: object) -> list[str]:
    """The names by which the class of an optimizer or scheduler is known, also that which it wraps.

    A class that is derived from one of torch's goes by the name of that one.
    """
    names = [_name(type(thing))]
    inner = next((vars(thing)[name] for name in _WRAPPED if isinstance(vars(thing).get(name), Optimizer)), None)
    if isinstance(thing, Optimizer) and inner is not None and inner is not thing:
        names += class_names(inner)
    return names


def is_of_lr_finder(scheduler: object) -> bool:
    """Whether Lightning's finder of learning rates has put it in place of the user's."""
    return type(scheduler).__module__ == lr_finder.__name__


def check_classes(
    names: Mapping[str, Sequence[Sequence[str]]] | None,
    optimizers: Sequence[tuple[Optimizer | LightningOptimizer, Mapping[str, Any]]],
    schedulers: Sequence[tuple[Any, Mapping[str, Any]]],
    *,
    strict: bool,
) -> None:
    """Compare optimizers and schedulers with the saved states that they are to get.

    Args:
        names: The saved names of classes under "optimizers" and "schedulers"; None where there are none.
        optimizers: Each with its state.
        schedulers: Each with its state.
        strict: Whether differences raise; else they are warned of.

    Raises:
        CheckpointError: Of another class.
    """
    problems: list[str] = []
    for kind, pairs in (("optimizer", [(unwrapped(o), state) for o, state in optimizers]), ("scheduler", schedulers)):
        saved = (names or {}).get(f"{kind}s")
        for i, (thing, state) in enumerate(pairs):
            if saved is not None and i < len(saved):
                found = None if _are_same(saved[i], class_names(thing)) else " in ".join(saved[i])
            else:
                found = _other_settings(thing, state)
            if found is not None:
                problems.append(f"{kind} {i} is {' in '.join(class_names(thing))} now, and {found} in the checkpoint")
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
    known = next((base for base in cls.__mro__ if _is_torchs(base)), cls)
    return f"{known.__module__}.{known.__qualname__}"


def _is_torchs(cls: type[Any]) -> bool:
    is_base = cls.__name__ in ("Optimizer", "LRScheduler", "_LRScheduler")
    return cls.__module__.startswith("torch.optim") and not is_base


def _are_same(saved: Sequence[str], now: Sequence[str]) -> bool:
    """Whether one is the other, or wraps it; a script's module has another name when it is imported."""
    return any(_is_name_of(there, here) for there in saved for here in now)


def _is_name_of(saved: str, now: str) -> bool:
    (there, name), (here, own) = saved.rsplit(".", 1), now.rsplit(".", 1)
    return name == own and (there == here or "__main__" in (there, here))


def _other_settings(thing: object, state: Mapping[str, Any]) -> str | None:
    """Settings in a state by which it is none of this class of torch's, in words."""
    if isinstance(thing, Optimizer) and _is_torchs(type(thing)):
        wanted, known = thing.defaults.keys() - _COMMON, _settings_of_optimizers()
        groups = [group.keys() & known for group in state["param_groups"]]
        differing = next((found for found in groups if found != wanted & known), None)
        return None if differing is None else f"one with the settings {', '.join(sorted(differing)) or 'of none'}"
    if not isinstance(thing, Optimizer) and _is_torchs(type(thing)):
        parameters = inspect.signature(type(thing)).parameters.values()
        required = {p.name for p in parameters if p.default is p.empty} & vars(thing).keys() - {"optimizer"}
        missing = sorted(required - state.keys() - {"schedulers"})
        return f"one without {', '.join(missing)}" if missing else None
    return None


def _settings_of_optimizers() -> set[str]:
    return {name for cls in _torchs_optimizers() for name in inspect.signature(cls).parameters} - _COMMON


def _torchs_optimizers() -> Iterator[type[Optimizer]]:
    for value in vars(torch.optim).values():
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer:
            yield value
