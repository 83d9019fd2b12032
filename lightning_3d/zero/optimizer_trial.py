"""Small optimizers like one of the user's, stepping random tensors side by side, to be compared after every step."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only

_SHAPES = {1: (132,), 2: (132, 130), 3: (132, 65, 2), 4: (132, 33, 2, 2)}  # some treat small matrices otherwise
_NO_SETTINGS = ("params", "param_names", "initial_lr", "fused", "foreach", "capturable")
_SIMPLE = (int, float, str, torch.dtype, type(None))


class Problem:
    """A tensor and its gradients, one a step, mostly of one direction; the last is not finite in one element."""

    def __init__(self, values: Tensor, gradients: Tensor) -> None:
        self.values, self._gradients = values, gradients

    @staticmethod
    def random(num_dims: int, num_steps: int, dtype: torch.dtype, device: torch.device) -> Problem:
        """A problem whose last rows, and columns, are larger, so that the norms of parts differ."""
        shape = _SHAPES[num_dims]
        scale = torch.ones(shape, dtype=dtype, device=device)
        for dim in range(min(num_dims, 2)):
            start = _cut(shape[dim])
            scale.narrow(dim, start, shape[dim] - start).mul_(10.0)
        common = torch.randn(shape, dtype=dtype, device=device)
        gradients = (common + torch.randn(num_steps, *shape, dtype=dtype, device=device)) * scale
        for step, gradient in enumerate(gradients):
            gradient *= 0.5 ** (step % 10)  # some change large steps after small ones, or small after large
        gradients[-1].view(-1)[0] = torch.inf
        return Problem(torch.randn(shape, dtype=dtype, device=device) * scale, gradients)

    def parts(self, dim: int) -> list[Problem]:
        """Its first rows (dim 0) or columns (dim 1), and the others."""
        size = self.values.shape[dim]
        return [self._part(dim, 0, _cut(size)), self._part(dim, _cut(size), size)]

    def empty(self) -> Problem:
        """None of its rows."""
        return self._part(0, 0, 0)

    def _part(self, dim: int, start: int, stop: int) -> Problem:
        values = self.values.narrow(dim, start, stop - start)
        return Problem(values.contiguous(), self._gradients.narrow(dim + 1, start, stop - start))

    def gradient(self, step: int) -> Tensor:
        """The gradient of one step; a copy."""
        return self._gradients[step].clone(memory_format=torch.contiguous_format)


class Trial:
    """An optimizer like the user's that steps some problems.

    Args:
        make: Makes it of parameter groups, each of some parameters.
        groups: The problems in each of its groups.
        moves: Whether other parameters take the place of those that it was made for, as in training.
        left_out: Index of a group whose parameters it was made for but does not have, as the owner of others.
    """

    def __init__(
        self,
        make: Callable[[Sequence[Sequence[nn.Parameter]]], Optimizer],
        groups: Sequence[Sequence[Problem]],
        *,
        moves: bool = False,
        left_out: int | None = None,
    ) -> None:
        self._problems = [problem for group in groups for problem in group]
        given = [[nn.Parameter(problem.values.clone()) for problem in group] for group in groups]
        self.optimizer = make(given)
        if moves:
            given = [[nn.Parameter(parameter.detach().clone()) for parameter in group] for group in given]
            for group, parameters in zip(self.optimizer.param_groups, given, strict=True):
                group["params"] = parameters
        if left_out is not None:
            self.optimizer.param_groups[left_out]["params"] = []
        self._parameters = [parameter for group in given for parameter in group]

    def step(self, number: int) -> None:
        """Step once."""
        self._give_gradients(number)
        self.optimizer.step()

    def _give_gradients(self, number: int) -> None:
        for parameter, problem in zip(self._parameters, self._problems, strict=True):
            parameter.grad = problem.gradient(number)

    def step_each(self, number: int) -> None:
        """Step once, each parameter of the one group by a call of its own."""
        self._give_gradients(number)
        (group,) = self.optimizer.param_groups
        settings = dict(group)
        for parameter in settings["params"]:
            group.clear()
            group.update({**settings, "params": [parameter]})
            self.optimizer.step()
        group["params"] = settings["params"]

    def descend(self, goals: Sequence[Tensor], *, by_closure: bool) -> None:
        """Step once down a bowl around each goal, which is steeper along some elements than along others."""

        def closure() -> Tensor:
            height = goals[0].new_zeros(())
            for parameter, goal in zip(self._parameters, goals, strict=True):
                steepness = torch.linspace(0.1, 1.0, goal.numel(), device=goal.device).view_as(goal)
                parameter.grad = (parameter.detach() - goal) * steepness
                height += (parameter.grad * (parameter.detach() - goal)).sum() / 2
            return height

        if by_closure:
            self.optimizer.step(closure)  # type: ignore[arg-type]  # torch declares one that returns a float
        else:
            closure()
            self.optimizer.step()

    def num_states(self) -> int:
        """Tensors with as many elements as the first parameter among its states."""
        first = self._parameters[0]
        states = [leaf for leaf in tree_leaves(self.optimizer.state[first]) if isinstance(leaf, Tensor)]
        return sum(leaf.numel() == first.numel() for leaf in states)

    def moved(self, index: int = 0) -> Tensor:
        """How far one problem's tensor is from where it began."""
        return self._parameters[index].detach() - self._problems[index].values

    def settings(self, index: int) -> str:
        """The settings of a group, beside its parameters, in words."""
        group = self.optimizer.param_groups[index]
        own = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
        return str(tree_map_only(Tensor, Tensor.tolist, own))


def maker(
    optimizer: Optimizer, group: Mapping[str, Any], lr: float
) -> Callable[[Sequence[Sequence[nn.Parameter]]], Optimizer]:
    """How to make optimizers with the settings of one group of `optimizer`, and of its own."""
    cls, own = type(optimizer), vars(optimizer)
    known = inspect.signature(cls.__init__).parameters
    settings = {key: value for key, value in group.items() if key not in _NO_SETTINGS}
    if settings.get("lr") is not None:
        settings["lr"] = lr
    arguments = {name: value for name, value in own.items() if _is_simple(value) or inspect.isroutine(value)}
    given = {name: value for name, value in {**arguments, **settings}.items() if name in known}
    attributes = {name: value for name, value in own.items() if isinstance(value, _SIMPLE)}

    def make(groups: Sequence[Sequence[nn.Parameter]]) -> Optimizer:
        made = cls([{"params": list(parameters), **copy.deepcopy(settings)} for parameters in groups], **given)
        vars(made).update(attributes)
        return made

    return make


def _cut(size: int) -> int:
    return size * 2 // 3


def _is_simple(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_simple(inner) for inner in value)
    return isinstance(value, _SIMPLE)
