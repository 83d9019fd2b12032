"""Fake tensors in place of a block's parameters, buffers and arguments, so that its forward runs without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


def device_of(leaves: Sequence[object]) -> torch.device:
    """One device for all fakes: the one that the arguments, else the parameters, really are on."""
    devices = (leaf.device for leaf in leaves if isinstance(leaf, Tensor) and leaf.device.type != "meta")
    return next(devices, torch.device("cpu"))


def fake(tensor: Tensor, device: torch.device) -> Tensor:
    """A leaf like `tensor`; call it under a ``FakeTensorMode``."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device, requires_grad=tensor.requires_grad)


def stand_in(block: nn.Module, fakes: Mapping[int, Tensor], device: torch.device) -> None:
    """Hang fake parameters and buffers where the block's code finds the real ones."""
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = fakes[id(parameter)]  # type: ignore[assignment]  # not a Parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer, device)
