"""The hooks around an optimizer's step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from operator import attrgetter
from typing import cast

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


def has_step_hooks(optimizer: object) -> bool:
    """Whether it is torch's and was initialised as one."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")


def first_step_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> RemovableHandle:
    """Call a hook after an optimizer's step before all others, whenever they were registered."""
    handle = optimizer.register_step_post_hook(hook)
    hooks = cast(OrderedDict[int, object], optimizer._optimizer_step_post_hooks)
    hooks.move_to_end(handle.id, last=False)
    return handle


def step_without_hooks(optimizer: Optimizer, *args: object) -> None:
    """Run an optimizer's own code once more inside of a step that its hooks belong to.

    Args:
        args: Of its ``step``.
    """
    attrgetter("step.__wrapped__")(type(optimizer))(optimizer, *args)
