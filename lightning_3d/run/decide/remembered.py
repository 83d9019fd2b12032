"""References of an optimizer to its parameters outside of its groups, where a step has others in their place."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.zero.wrapped_optimizers import with_wrapped


def remembering_attribute(optimizer: Optimizer) -> str | None:
    """The attribute of an optimizer, if any, in which its parameters are found, or their ids; also inside of others.

    Its groups, their lists of parameters and its state may be found there, as those are changed for a step in place.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = [value for group in optimizer.param_groups for value in (group, group["params"])]
    known += [one.state for one in with_wrapped(optimizer)]
    seen = {*map(id, [optimizer, optimizer.param_groups, *known])}
    return next((name for name, value in vars(optimizer).items() if _holds(value, held, seen)), None)


def _holds(value: object, held: set[int], seen: set[int]) -> bool:
    """Whether one of these objects or ids is inside of a value, apart from what was `seen`."""
    left = [value]
    while left:
        value = left.pop()
        if id(value) in held or (type(value) is int and value in held):
            return True
        if id(value) in seen or isinstance(value, (Tensor, nn.Module)):  # a module has its own parameters
            continue
        seen.add(id(value))
        if isinstance(value, (set, frozenset, list, tuple, dict)):
            left += value
        left += value.values() if isinstance(value, dict) else getattr(value, "__dict__", {}).values()
    return False
