"""How much of a parameter an optimizer has to see at once, found by trying it on small tensors."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
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

OptimizerKind = Literal["rows", "parameters", "all"]
"""``"rows"``: it works element by element, so any rows of a parameter can be stepped alone. ``"parameters"``: it needs
whole parameters (their norms, their singular vectors). ``"all"``: it needs all parameters together, or was not
understood."""

_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, RMSprop, Adadelta, Adamax, ASGD, Rprop)
_ROWS, _CUT, _STEPS = 6, 4, 3
_TOLERANCE = 1e-5  # relative; element by element the differences are rounding at most


def optimizer_kind(optimizer: Optimizer) -> OptimizerKind:
    """Find the kind of an optimizer; the same on all ranks. Nothing of it is changed.

    Optimizers of its class with its settings step small random tensors: whole, cut in two, and beside another.
    """
    if type(optimizer) in _ELEMENTWISE:
        return "rows"
    dims = {min(parameter.dim(), 4) for group in optimizer.param_groups for parameter in group["params"]} - {0}
    with random_states_kept():
        torch.manual_seed(0)
        try:
            kinds = {_kind(optimizer, dim) for dim in sorted(dims or {1})}
        except Exception:  # of the user's class: whatever it can't do with such tensors
            return "all"
    return "all" if "all" in kinds else "parameters" if "parameters" in kinds else "rows"


def _kind(optimizer: Optimizer, dim: int) -> OptimizerKind:
    shape = (_ROWS, 4, 3, 3)[:dim]
    first, second = _Trial.random(shape), _Trial.random(shape)
    alone = first.stepped(optimizer)
    beside, _ = _step_together(optimizer, [first, second])
    if not _is_close(alone, beside):
        return "all"
    cut = torch.cat([part.stepped(optimizer) for part in (first.rows(0, _CUT), first.rows(_CUT, _ROWS))])
    return "rows" if _is_close(alone, cut) else "parameters"


class _Trial:
    """A tensor and its gradients."""

    def __init__(self, values: Tensor, gradients: list[Tensor]) -> None:
        self.values, self.gradients = values, gradients

    @staticmethod
    def random(shape: tuple[int, ...]) -> _Trial:
        scale = torch.ones(shape)
        scale[_CUT:] = 10.0  # so that the norms of the parts differ
        return _Trial(torch.randn(shape) * scale, [torch.randn(shape) * scale for _ in range(_STEPS)])

    def rows(self, start: int, stop: int) -> _Trial:
        return _Trial(self.values[start:stop], [gradient[start:stop] for gradient in self.gradients])

    def stepped(self, optimizer: Optimizer) -> Tensor:
        (values,) = _step_together(optimizer, [self])
        return values


def _step_together(optimizer: Optimizer, trials: Iterable[_Trial]) -> list[Tensor]:
    trials = list(trials)
    parameters = [nn.Parameter(trial.values.clone()) for trial in trials]
    like = _like(optimizer, parameters)
    for step in range(_STEPS):
        for parameter, trial in zip(parameters, trials, strict=True):
            parameter.grad = trial.gradients[step].clone()
        like.step()
    return [parameter.detach() for parameter in parameters]


def _like(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class and settings."""
    group = optimizer.param_groups[0]
    known = inspect.signature(type(optimizer).__init__).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    settings: dict[str, Any] = {key: value for key, value in group.items() if key in known or takes_any}
    for key in ("params", "initial_lr", "fused", "foreach", "capturable"):
        settings.pop(key, None)
    if not settings.get("lr", True):  # a schedule may begin with 0
        settings["lr"] = 1e-2
    return type(optimizer)(parameters, **settings)


def _is_close(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= _TOLERANCE * a.abs().max())
