"""Loading states into an optimizer as they lie between steps, where that is not as torch's ``load_state_dict`` has it.

torch gives them the device and dtype of the parameter; offloaded states are to stay in host memory, and those of 16-bit
parameters that are stepped in fp32 are to stay in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.torch_internals.pytree import tree_map_only

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
    waiting: dict[str, Any] = {}

    def before(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        waiting.update(saved)
        return {**saved, "state": {}}

    def after(_: Optimizer) -> None:
        groups = waiting["param_groups"]
        indices = chain.from_iterable(group["params"] for group in groups)
        parameters = [(group, p) for group in optimizer.param_groups for p in group["params"]]
        for index, (group, parameter) in zip(indices, parameters, strict=True):
            if index in waiting["state"]:
                optimizer.state[parameter] = _placed(waiting["state"][index], parameter, group, placement)
        waiting.clear()
        loaded(optimizer)

    hooks = (
        optimizer.register_load_state_dict_pre_hook(before),
        optimizer.register_load_state_dict_post_hook(after, prepend=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _placed(
    state: Mapping[str, Any], parameter: nn.Parameter, group: Mapping[str, Any], placement: Placement
) -> dict[str, Any]:
    """On the device and of the dtype that they are to have, but for the dtype of step counts."""
    device, wanted = placement(parameter)
    dtype = wanted if parameter.is_floating_point() else None
    on_device = group.get("fused") or group.get("capturable")
    placed: dict[str, Any] = {}
    for name, value in state.items():
        if name == "step":  # as torch has it
            to = partial(_to, device=device if on_device else None, dtype=torch.float32 if on_device else None)
        else:
            to = partial(_to, device=device, dtype=dtype)
        placed[name] = tree_map_only(Tensor, to, value)
    return placed


def _to(tensor: Tensor, device: torch.device | None, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device=device or tensor.device, dtype=dtype or tensor.dtype)
