"""How much of a parameter an optimizer has to see at once, found by trying it on small tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
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
from lightning_3d.zero.optimizer_trial import Problem, Trial, maker

OptimizerKind = Literal["rows", "parameters", "all"]
"""``"rows"``: it works element by element, so any rows of a parameter can be stepped alone. ``"parameters"``: it needs
whole parameters (their norms, their singular vectors). ``"all"``: it needs all parameters together, holds them
elsewhere than in its groups, or was not understood."""

_CPU = torch.device("cpu")
_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, RMSprop, Adadelta, Adamax, ASGD, Rprop)
_STEPS = 30  # some begin to do other things after a while
_SHORT = 20  # of those that do not work element by element, which cost more
_MOST_GROWTH = 500  # steps
_NO_GROWTH = 10  # steps after which states are taken to grow no more
_LRS = (1e-2, 1.0)  # a schedule may begin with 0; some learn their own rate, from 1 alone
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative to how far parameters move


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that work element by element."""
    return type(optimizer) in _ELEMENTWISE


def optimizer_kind(optimizer: Optimizer, *, cuts: Sequence[int] = (0,), device: torch.device = _CPU) -> OptimizerKind:
    """Find the kind of an optimizer. Nothing of it is changed.

    Optimizers of its class with the settings of each of its groups step random tensors: whole, cut in two, beside
    another, beside an empty one, and with an empty group.

    Args:
        cuts: Dims along which ranks share parameters.
        device: Where it steps.
    """
    if is_known(optimizer):
        return "rows"
    with random_states_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = {_kind(make, dim, cuts, device) for make, dim in _cases(optimizer)}
    return "all" if "all" in kinds else "parameters" if "parameters" in kinds else "rows"


def steps_apart(optimizer: Optimizer) -> bool:
    """Whether it makes no difference on CPUs that a step is several calls, each for some of the parameters.

    Settings in the groups are in each call those from before the step; the optimizer is of another kind than "all".
    """
    if is_known(optimizer):
        return True
    with random_states_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return all(_steps_apart(make, dim) for make, dim in _cases(optimizer))


def _steps_apart(make: _Make, dim: int) -> bool:
    torch.manual_seed(0)
    problems = [Problem.random(dim, _STEPS, torch.float32, _CPU) for _ in range(2)]
    together, apart = Trial(make, [problems]), Trial(make, [problems])
    for step in range(_SHORT):
        together.step(step)
        apart.step_each(step)
        if not all(_is_close(together.moved(i), apart.moved(i), _TOLERANCES[torch.float32]) for i in range(2)):
            return False
    return True


def num_states(optimizer: Optimizer) -> int:
    """Tensors like a parameter that an optimizer keeps for it once they grow no more; 0 if it can't be tried.

    That of LBFGS grows for as many iterations as it remembers.
    """
    with random_states_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for by_closure in (False, True):
            torch.manual_seed(0)
            try:
                return _most_states(optimizer, by_closure=by_closure)
            except Exception:  # as in `_kind`
                continue
    return 0


def _most_states(optimizer: Optimizer, *, by_closure: bool) -> int:
    problem = Problem.random(2, 1, torch.float32, _CPU)
    if by_closure:  # which takes many iterations
        problem = Problem(torch.randn(8, 12), torch.empty(0))
    trial = Trial(maker(optimizer, optimizer.param_groups[0], _LRS[0]), [[problem]])
    goal, most, num_alike = torch.zeros_like(problem.values), 0, 0
    for _ in range(_MOST_GROWTH):
        goal = goal + 0.1 * torch.randn_like(goal)  # else one that has arrived remembers nothing more
        trial.descend([goal], by_closure=by_closure)
        num = trial.num_states()
        num_alike = num_alike + 1 if num <= most else 0
        most = max(most, num)
        if num_alike == _NO_GROWTH:
            break
    return most


_Make = Callable[[Any], Optimizer]


def _cases(optimizer: Optimizer) -> Iterator[tuple[_Make, int]]:
    """How to make an optimizer with the settings of each group, and numbers of dims of the group's parameters."""
    seen: set[str] = set()
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for dim in sorted({min(parameter.dim(), 4) for parameter in group["params"]} - {0}):
            case = repr((dim, sorted(settings.items(), key=str)))
            if case not in seen:
                yield from ((maker(optimizer, group, lr), dim) for lr in _LRS)
            seen.add(case)


def _kind(make: _Make, dim: int, cuts: Sequence[int], device: torch.device) -> OptimizerKind:
    for dtype in _TOLERANCES:
        torch.manual_seed(0)
        try:
            return _compare(make, dim, [cut for cut in cuts if cut < dim], dtype, device)
        except Exception:  # of the user's class: whatever it can't do with such tensors
            continue
    return "all"


def _compare(make: _Make, dim: int, cuts: Sequence[int], dtype: torch.dtype, device: torch.device) -> OptimizerKind:
    first, second = (Problem.random(dim, _STEPS, dtype, device) for _ in range(2))
    alone, tolerance = Trial(make, [[first]]), _TOLERANCES[dtype]
    full, empty = Trial(make, [[first], [second]]), Trial(make, [[first], [second]], left_out=1)
    same = [Trial(make, [[first, second]]), Trial(make, [[first]], moves=True), full, empty]
    parts = _Parts(make, first, cuts, tolerance)
    for step in range(_STEPS):
        if _SHORT <= step < _STEPS - 1 and not parts.are_alike:
            continue
        try:
            for trial in (alone, *same):
                trial.step(step)
        except Exception:
            if step == _STEPS - 1:  # it does not take gradients that are not finite
                break
            raise
        moved = alone.moved()
        if not all(_is_close(moved, trial.moved(), tolerance) for trial in same):
            return "all"
        if full.settings(1) != empty.settings(1):  # what is counted in a group is to be alike on all ranks
            return "all"
        parts.step(step, moved)
    return "rows" if parts.are_alike else "parameters"


class _Parts:
    """A problem cut along some dims, and an empty one beside another, stepped until they move otherwise than whole."""

    def __init__(self, make: _Make, whole: Problem, cuts: Sequence[int], tolerance: float) -> None:
        self._tolerance = tolerance
        self._cuts: list[tuple[int, list[Trial]]] = []
        self.are_alike = True
        """Whether they moved as the whole does."""
        with self._telling():
            self._cuts = [(dim, [Trial(make, [[part]]) for part in whole.parts(dim)]) for dim in cuts]
            self._cuts.append((0, [Trial(make, [[whole, whole.empty()]])]))

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except Exception:  # what it does with whole ones it can't do with these
            self.are_alike = False

    def step(self, number: int, moved: Tensor) -> None:
        """Step once, and compare with how far the whole has moved."""
        if not self.are_alike:
            return
        with self._telling():
            for dim, trials in self._cuts:
                for trial in trials:
                    trial.step(number)
                parts = torch.cat([trial.moved() for trial in trials], dim)
                self.are_alike &= _is_close(moved, parts, self._tolerance)


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether movements are alike, elements that are not finite included."""
    if torch.equal(a, b):
        return True
    finite = a.isfinite()
    if not torch.equal(finite, b.isfinite()):
        return False
    a, b = a[finite], b[finite]
    return not a.numel() or bool((a - b).abs().max() <= tolerance * a.abs().max())
