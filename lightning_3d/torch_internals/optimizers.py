"""The hooks around an optimizer's step, and the groups in which torch averages weights."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer, swa_utils
from torch.utils.hooks import RemovableHandle

from lightning_3d.torch_internals.patches import replaced


def has_step_hooks(optimizer: object) -> bool:
    """Whether it is torch's and was initialised as one."""
    return isinstance(optimizer, Optimizer) and hasattr(optimizer, "_optimizer_step_post_hooks")


def make_hookable(optimizer: Optimizer) -> None:
    """Give an optimizer all hooks of torch's, also where its class does not call ``Optimizer.__init__``, or has plain
    dicts for them.
    """
    Optimizer.__setstate__(optimizer, {})
    vars(optimizer).update(
        (n, OrderedDict(v)) for n, v in vars(optimizer).items() if n.endswith("_hooks") and type(v) is dict
    )


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


def averages_grouped() -> AbstractContextManager[None]:
    """Let ``AveragedModel`` group tensors by the devices that they tell: C++ sees where memory is, or none."""
    return replaced("averages", swa_utils, {"_group_tensors_by_device_and_dtype": _by_device_and_dtype})


def _by_device_and_dtype(
    lists: Sequence[Sequence[Tensor]], with_indices: bool = False
) -> dict[tuple[torch.device, torch.dtype], tuple[list[list[Tensor]], list[int]]]:
    """(device, dtype) -> the tensors of each list that go with those of the first that have them, and their places."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, tensor in enumerate(lists[0]):
        groups.setdefault((tensor.device, tensor.dtype), []).append(i)
    return {key: ([[values[i] for i in places] for values in lists], places) for key, places in groups.items()}
