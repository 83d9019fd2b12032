"""How much of a parameter an optimizer has to see at once, found by trying copies of it on small tensors."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import (
    ASGD,
    LBFGS,
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

from lightning_3d.distributed.rng import random_states_kept
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.own_collectives import CollectiveError, NoCollectives
from lightning_3d.zero.wrapped_optimizers import with_wrapped

OptimizerKind = Literal["elements", "parameters", "all"]
"""``"elements"``: it works element by element, so that any part of a parameter can be stepped alone. ``"parameters"``:
it needs whole parameters (their norms, their singular vectors). ``"all"``: it needs all parameters together, holds them
elsewhere than in its groups, or was not understood."""

KINDS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)
"""From those that have to see least on."""

_CPU = torch.device("cpu")
_ELEMENTWISE = (SGD, Adam, AdamW, NAdam, RAdam, Adagrad, RMSprop, Adadelta, Adamax, ASGD, Rprop)
_STEPS = 20  # some begin to do other things after a while
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}  # relative to how far parameters move
_SHAPES = {1: (132,), 2: (132, 130), 3: (132, 65, 2), 4: (132, 33, 2, 2)}  # some treat small matrices otherwise
_PLAIN = {"fused": None, "foreach": None, "capturable": False}  # these change how fast a step is

_Problem = tuple[Tensor, Tensor]
"""Values of a parameter, and its gradient in each step."""


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is one of torch's that work element by element."""
    return type(optimizer) in _ELEMENTWISE


States = Mapping[Any, Mapping[str, object]]
"""Parameter -> its states in an optimizer."""


def first_states(optimizer: Optimizer) -> States:
    """The states that an optimizer notes of parameters when it is made, as ``self.state[p]["use_muon"]``."""
    return {parameter: _plain(state) for parameter, state in optimizer.state.items()}


def optimizer_kind(optimizer: Optimizer, *, device: torch.device = _CPU, first: States | None = None) -> OptimizerKind:
    """Find the kind of an optimizer. Nothing of it is changed.

    Copies of it step random tensors: whole, beside others, cut in two, beside an empty one.

    Args:
        device: Where it steps.
        first: Its `first_states`, if it has stepped since.
    """
    if is_known(optimizer):
        return "elements"
    with _undisturbed():
        kinds = {_kind(optimizer, case, device) for case in _cases(optimizer, first)}
    return max(kinds, key=KINDS.index, default="elements")


def communicates(optimizer: Optimizer, *, device: torch.device = _CPU) -> bool:
    """Whether its steps make collectives, so that all ranks have to come to them with all parameters.

    Args:
        device: Where it steps.
    """
    if is_known(optimizer):
        return False
    with _undisturbed():
        for case in _cases(optimizer):
            try:
                _try(optimizer, case, [[_problem(case.num_dims, torch.float32, device)]])
            except CollectiveError:
                return True
            except Exception:  # as in `_kind`
                continue
    return False


def num_states(optimizer: Optimizer) -> int:
    """Tensors like a parameter that an optimizer keeps for it; 0 if it can't be tried."""
    if isinstance(optimizer, LBFGS):  # once it remembers as many iterations as it may
        return 2 * int(optimizer.param_groups[0]["history_size"]) + 2
    with _undisturbed():
        try:
            trials = [_try(optimizer, case, [[_problem(case.num_dims, torch.float32)]]) for case in _cases(optimizer)]
        except Exception:  # as in `_kind`
            return 0
    return max((trial.num_states for trial in trials), default=0)


def missing_when_resumed(optimizer: Optimizer, group: Mapping[str, Any], state: Mapping[str, object]) -> str | None:
    """The setting or state that a step would look for in vain, were a saved one loaded; None also if it can't be tried.

    A copy of the optimizer loads them and steps one parameter. Nothing of the optimizer is changed.

    Args:
        group: A saved group, with one parameter of the saved shape in "params".
        state: What was saved of that parameter; shapes count, not values.
    """
    settings = {key: value for key, value in _PLAIN.items() if key in group}
    parameter = group["params"][0]
    parameter.grad = torch.zeros_like(parameter)
    with _undisturbed():
        try:
            copied = _copied(optimizer, optimizer.param_groups[0], [{**group}])
            copied.load_state_dict({"state": {0: state}, "param_groups": [{**group, **settings, "params": [0]}]})
            copied.step()
        except KeyError as error:
            name = error.args[0] if error.args else None
            return name if isinstance(name, str) and name not in group and name not in state else None
        except Exception:  # as in `_kind`
            return None
    return None


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Around trials, which one rank may run alone."""
    with random_states_kept(), warnings.catch_warnings(), NoCollectives():  # type: ignore[no-untyped-call]  # torch 2.13
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A kind of parameter: all that decides how an optimizer steps it."""

    group: Mapping[str, object] = field(repr=False)
    """Its group, the first with such parameters."""
    settings: Mapping[str, object]
    """The settings of its group."""
    num_dims: int
    attributes: Mapping[str, object]
    """Attributes that the user's code has set on it, as ``p.use_muon = True``."""
    state: Mapping[str, object]
    """The state that the optimizer has noted when it was made, as ``self.state[p]["use_muon"]``."""


def _cases(optimizer: Optimizer, first: States | None = None) -> list[_Case]:
    """The kinds of parameters, one for all that are stepped alike."""
    cases: dict[str, _Case] = {}
    states = first_states(optimizer) if first is None else first
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        settings.update((key, value) for key, value in _PLAIN.items() if key in group)
        if isinstance(group.get("lr"), float | Tensor):  # a schedule may begin with 0
            settings["lr"] = max(group["lr"], 1e-2)
        for parameter in group["params"]:
            attributes, state = _plain(vars(parameter)), states.get(parameter, {})
            num_dims, stepping = min(parameter.dim(), 4), _holders(optimizer, group)
            case = _Case(group=group, settings=settings, num_dims=num_dims, attributes=attributes, state=state)
            if case.num_dims:
                cases.setdefault(f"{case} {stepping}", case)
    return list(cases.values())


def _holders(optimizer: Optimizer, group: Mapping[str, object]) -> list[bool]:
    """Which of an optimizer and those that it wraps have a group."""
    return [any(other is group for other in one.param_groups) for one in with_wrapped(optimizer)]


def _plain(values: Mapping[Any, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if isinstance(value, (bool, int, float, str))}


def _kind(optimizer: Optimizer, case: _Case, device: torch.device) -> OptimizerKind:
    dim = case.num_dims
    for dtype in _TOLERANCES:
        first, second = (_problem(dim, dtype, device) for _ in range(2))
        try:
            alone = _try(optimizer, case, [[first], []])
            beside = _try(optimizer, case, [[first, second], [second]])
        except Exception:  # of the user's class: whatever it can't do with such tensors
            continue
        # What is counted in a group is to be alike on all ranks, of which some have none of its parameters.
        is_alike = _are_close(alone.moved, beside.moved) and alone.settings == beside.settings
        if not is_alike or not alone.moved.any():
            return "all"
        try:
            is_elementwise = _are_close(alone.moved, _try(optimizer, case, [[first, _part(first, 0, 0, 0)]]).moved)
            for cut in range(min(dim, 2)):  # as ZeRO and tensor parallel share parameters
                size = first[0].shape[cut]
                ends = (0, size * 2 // 3, size)
                parts = [_part(first, cut, *pair) for pair in pairwise(ends)]
                moved = torch.cat([_try(optimizer, case, [[part]]).moved for part in parts], cut)
                is_elementwise &= _are_close(alone.moved, moved)
        except Exception:  # what it does with whole ones it can't do with these
            return "parameters"
        return "elements" if is_elementwise else "parameters"
    return "all"


def _problem(num_dims: int, dtype: torch.dtype, device: torch.device = _CPU) -> _Problem:
    """Random values, and gradients mostly of one direction; last rows and columns are larger, so that norms differ."""
    shape = _SHAPES[num_dims]
    scale = torch.ones(shape, dtype=dtype, device=device)
    for dim, size in enumerate(shape[:2]):
        scale.narrow(dim, size * 2 // 3, size - size * 2 // 3).mul_(10.0)
    gradients = torch.randn_like(scale) + torch.randn(_STEPS, *shape, dtype=dtype, device=device)
    for step, gradient in enumerate(gradients):
        gradient *= scale * 0.5 ** (step % 10)  # some change large steps after small ones, or small after large
    return torch.randn_like(scale) * scale, gradients


def _part(problem: _Problem, dim: int, start: int, stop: int) -> _Problem:
    values, gradients = problem
    return values.narrow(dim, start, stop - start), gradients.narrow(dim + 1, start, stop - start)


@dataclass(frozen=True, kw_only=True)
class _Trial:
    """The outcome of some steps, for the first of the tensors."""

    moved: Tensor
    settings: str
    """Settings of the groups, in words."""
    num_states: int


def _try(optimizer: Optimizer, case: _Case, groups: Sequence[Sequence[_Problem]]) -> _Trial:
    """Step a copy of an optimizer with other parameters, in groups of the same settings."""
    parameters = [[nn.Parameter(_new(values)) for values, _ in group] for group in groups]
    settings = [{**copy.deepcopy(case.settings), "params": group} for group in parameters]
    copied = _copied(optimizer, case.group, settings)
    for parameter in chain(*parameters):
        vars(parameter).update(case.attributes)
        if case.state:
            copied.state[parameter] = {**case.state}
    if callable(train := getattr(copied, "train", None)):  # schedule-free ones step in this mode alone
        train()
    for step in range(_STEPS):
        for parameter, (_, gradients) in zip(chain(*parameters), chain(*groups), strict=True):
            parameter.grad = _new(gradients[step])
        copied.step()
    first, settings_now = parameters[0][0], [{**group, "params": None} for group in copied.param_groups]
    held = [one.state[first] for one in with_wrapped(copied)]
    states = [leaf for leaf in tree_leaves(held) if isinstance(leaf, Tensor)]
    return _Trial(
        moved=first.detach() - groups[0][0][0],
        settings=str(settings_now),
        num_states=sum(leaf.numel() == first.numel() for leaf in states),
    )


def _new(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _copied(optimizer: Optimizer, group: Mapping[str, object], groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer with the same attributes, without states, hooks and the parameters that it refers to.

    Args:
        group: One of its groups.
        groups: What it has in its place, as have those that it wraps; all other groups are left out.
    """
    copied = object.__new__(type(optimizer))
    known: dict[int, object] = {
        id(p): nn.Parameter(torch.empty(0)) for other in optimizer.param_groups for p in other["params"]
    }
    known.update((id(v), v) for v in vars(optimizer).values() if isinstance(v, (dist.ProcessGroup, DeviceMesh)))
    wrapped = with_wrapped(optimizer)
    for one, has_group in zip(wrapped, _holders(optimizer, group), strict=True):
        known.update({id(one.param_groups): groups if has_group else [], id(one.state): defaultdict(dict)})
        known.update((id(v), OrderedDict()) for name, v in vars(one).items() if name.endswith("_hooks"))
    known[id(optimizer)] = copied
    vars(copied).update(copy.deepcopy({k: v for k, v in vars(optimizer).items() if k != "step"}, known))
    for one in with_wrapped(copied):
        vars(one).pop("step", None)  # as a schedule wraps it
    return copied


def _are_close(a: Tensor, b: Tensor) -> bool:
    """Whether movements are alike, elements that are not finite included."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return False
    a, b = a.nan_to_num(0.0, 0.0, 0.0), b.nan_to_num(0.0, 0.0, 0.0)
    return bool((a - b).abs().max() <= _TOLERANCES[a.dtype] * a.abs().max())
