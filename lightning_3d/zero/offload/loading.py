"""Loading states into an optimizer without passing the device: ``load_state_dict`` moves them to that of parameters."""

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


@contextmanager
def loading_to_host(optimizer: Optimizer, loaded: Callable[[Optimizer], None]) -> Iterator[None]:
    """Let ``load_state_dict`` leave states on the CPU inside.

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
                optimizer.state[parameter] = _cast(waiting["state"][index], parameter, group)
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


def _cast(state: Mapping[str, Any], parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """With the dtypes that torch gives them: that of the parameter, but for step counts."""
    dtype = parameter.dtype if parameter.is_floating_point() else None
    step = torch.float32 if group.get("fused") else None
    return {
        name: tree_map_only(Tensor, partial(_on_host, dtype=step if name == "step" else dtype), value)
        for name, value in state.items()
    }


def _on_host(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.to(device="cpu", dtype=dtype or tensor.dtype)
