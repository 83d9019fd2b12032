"""How much of a parameter an optimizer has to see at once, found by trying it on small tensors."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from lightning_3d.torch_internals.lightning_helpers import random_states_kept
from lightning_3d.torch_internals.pytree import tree_leaves

OptimizerKind = Literal["rows", "parameters", "all"]
"""``"rows"``: it works element by element, so any rows of a parameter can be stepped alone. ``"parameters"``: it needs
whole parameters (their norms, their singular vectors). ``"all"``: it needs all parameters together, holds them
elsewhere than in its groups, or was not understood."""

_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, RMSprop, Adadelta, Adamax, ASGD, Rprop)
_ROWS, _CUT, _STEPS = 160, 100, 4  # large enough for optimizers that treat small matrices otherwise
_SHAPE = (_ROWS, 136, 2, 2)
_LR = 1e-2  # a schedule may begin with 0
_TOLERANCE = 1e-6  # relative to how far parameters move, in float64


def optimizer_kind(optimizer: Optimizer) -> OptimizerKind:
    """Find the kind of an optimizer; the same on all ranks. Nothing of it is changed.

    Optimizers of its class with the settings of each of its groups step random tensors: whole, cut in two, and beside
    another; the last gradient is not finite in one element.
    """
    if type(optimizer) in _ELEMENTWISE:
        return "rows"
    dims = {min(parameter.dim(), 4) for group in optimizer.param_groups for parameter in group["params"]} - {0}
    with random_states_kept():
        torch.manual_seed(0)
        try:
            settings = _distinct([_settings(optimizer, group) for group in optimizer.param_groups])
            kinds = {_kind(type(optimizer), own, dim) for own in settings for dim in sorted(dims or {1})}
        except Exception:  # of the user's class: whatever it can't do with such tensors
            return "all"
    return "all" if "all" in kinds else "parameters" if "parameters" in kinds else "rows"


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether it makes no difference that a step is several calls, each for some of the parameters.

    Settings in the groups are in each call those from before the step; the optimizer is of another kind than "all".
    """
    if type(optimizer) in _ELEMENTWISE:
        return True
    dims = {min(parameter.dim(), 4) for group in optimizer.param_groups for parameter in group["params"]} - {0}
    with random_states_kept():
        torch.manual_seed(0)
        for own in _distinct([_settings(optimizer, group) for group in optimizer.param_groups]):
            trials = [_Trial.random(_SHAPE[: max(dims, default=1)]) for _ in range(2)]
            together, apart = (_step(type(optimizer), own, trials, apart=apart) for apart in (False, True))
            if not all(map(_is_close, together, apart)):
                return False
    return True


def num_states(optimizer: Optimizer) -> int:
    """Tensors like a parameter that an optimizer makes for it, after the first step; 0 if it can't be tried."""
    with random_states_kept():
        trial = _Trial.random(_SHAPE[:2])
        try:
            made = type(optimizer)([nn.Parameter(trial.values)], **_settings(optimizer, optimizer.param_groups[0]))
            (parameter,) = made.param_groups[0]["params"]
            parameter.grad = trial.gradients[0]
            made.step()
        except Exception:  # as in `optimizer_kind`
            return 0
    return sum(leaf.shape == parameter.shape for leaf in tree_leaves(made.state[parameter]) if isinstance(leaf, Tensor))


def _settings(optimizer: Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of the constructor that make the group's settings."""
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in known.values())
    left_out = ("params", "initial_lr", "fused", "foreach", "capturable")
    settings = {key: v for key, v in group.items() if (key in known or takes_any) and key not in left_out}
    return {**settings, "lr": _LR} if settings.get("lr") is not None else settings


def _distinct(settings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({repr(sorted(own.items())): own for own in settings}.values())


def _kind(cls: type[Optimizer], settings: dict[str, Any], dim: int) -> OptimizerKind:
    first, second = _Trial.random(_SHAPE[:dim]), _Trial.random(_SHAPE[:dim])
    (alone,) = _step(cls, settings, [first])
    beside, _ = _step(cls, settings, [first, second])
    (elsewhere,) = _step(cls, settings, [first], moves=True)
    if not (_is_close(alone, beside) and _is_close(alone, elsewhere)):
        return "all"
    cut = [_step(cls, settings, [part])[0] for part in (first.rows(0, _CUT), first.rows(_CUT, _ROWS))]
    return "rows" if _is_close(alone, torch.cat(cut)) else "parameters"


class _Trial:
    """A tensor and its gradients."""

    def __init__(self, values: Tensor, gradients: list[Tensor]) -> None:
        self.values, self.gradients = values, gradients

    @staticmethod
    def random(shape: tuple[int, ...]) -> _Trial:
        scale = torch.ones(shape, dtype=torch.float64)
        scale[_CUT:] = 10.0  # so that the norms of the parts differ
        gradients = [torch.randn(shape, dtype=torch.float64) * scale for _ in range(_STEPS)]
        gradients[-1].view(-1)[0] = torch.inf
        return _Trial(torch.randn(shape, dtype=torch.float64) * scale, gradients)

    def rows(self, start: int, stop: int) -> _Trial:
        return _Trial(self.values[start:stop], [gradient[start:stop] for gradient in self.gradients])


def _step(
    cls: type[Optimizer],
    settings: dict[str, Any],
    trials: Sequence[_Trial],
    *,
    moves: bool = False,
    apart: bool = False,
) -> list[Tensor]:
    """How far an optimizer has moved each parameter after every step.

    Args:
        moves: Whether other parameters take the place of those that the optimizer was made for, as in training.
        apart: Whether each parameter is stepped by a call of its own.
    """
    parameters = [nn.Parameter(trial.values.clone()) for trial in trials]
    optimizer = cls(parameters, **settings)
    if moves:
        parameters = [nn.Parameter(trial.values.clone()) for trial in trials]
        optimizer.param_groups[0]["params"] = parameters
    moved: list[list[Tensor]] = [[] for _ in trials]
    for step in range(_STEPS):
        for parameter, trial in zip(parameters, trials, strict=True):
            parameter.grad = trial.gradients[step].clone()
        if apart:
            _step_each(optimizer, parameters)
        else:
            optimizer.step()
        for parameter, trial, far in zip(parameters, trials, moved, strict=True):
            far.append(parameter.detach() - trial.values)
    return [torch.stack(far, dim=1) for far in moved]


def _step_each(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    (group,) = optimizer.param_groups
    settings = dict(group)
    for parameter in parameters:
        group.clear()
        group.update({**settings, "params": [parameter]})
        optimizer.step()
    group["params"] = settings["params"]


def _is_close(a: Tensor, b: Tensor) -> bool:
    """Whether movements (rows, steps, ...) are alike in every step, elements that are not finite included."""
    for one, other in zip(a.unbind(1), b.unbind(1), strict=True):
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return False
        one, other = one[finite], other[finite]
        if one.numel() and (one - other).abs().max() > _TOLERANCE * one.abs().max():
            return False
    return True
