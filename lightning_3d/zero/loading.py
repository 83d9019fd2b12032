"""Loading states into an optimizer as they lie between steps, where that is not as torch's ``load_state_dict`` has it.

torch gives them the device and dtype of the parameter; offloaded states are to stay in host memory, and those of 16-bit
parameters that are stepped in fp32 are to stay in fp32. So it loads them for empty tensors that lie there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_3d.zero.swapped import Swapped

Placement = Callable[[nn.Parameter], tuple[torch.device, torch.dtype]]
"""A parameter -> where its states lie, and their dtype."""


@contextmanager
def loading_states(
    optimizer: Optimizer, placement: Placement, loaded: Callable[[Optimizer], None] = lambda _: None
) -> Iterator[None]:
    """Let ``load_state_dict`` put states where they belong inside.

    Args:
        loaded: Called with the optimizer after it has loaded.
    """
    swapped: list[Swapped] = []

    def stand_in(parameter: nn.Parameter) -> nn.Parameter:
        device, dtype = placement(parameter)
        return nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad=False)

    def put_back() -> None:
        if swapped:
            swapped.pop().back()

    def before(_: Optimizer, saved: dict[str, Any]) -> None:
        put_back()  # from a load that failed
        if _sizes(saved["param_groups"]) == _sizes(optimizer.param_groups):  # else torch refuses it
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            swapped.append(Swapped(optimizer, {parameter: stand_in(parameter) for parameter in parameters}))

    def after(*_: object) -> None:
        put_back()
        loaded(optimizer)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        put_back()
        for hook in hooks:
            hook.remove()


def _sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]
