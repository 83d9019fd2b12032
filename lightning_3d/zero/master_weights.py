"""Stepping 16-bit parameters in fp32.

While an optimizer steps, the part of a 16-bit parameter that this rank steps is replaced by its master weights: fp32
values that are kept with the optimizer's state and rounded into the parameter after the step.

Code may write to a parameter between steps (a checkpoint that is loaded, weights that are clipped). Where a parameter
is no longer the rounded master weight, the master weight follows it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.torch_internals.tensors import HALVES
from lightning_3d.zero.swapped import StandIns

MASTER = "master_weight"
"""The name of master weights in an optimizer's state."""


def is_half(tensor: Tensor) -> bool:
    """Whether its numbers have 16 bits."""
    return tensor.dtype in HALVES


def without_masters(_: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A hook before states are loaded: leave out the master weights of a run that kept them."""
    states = saved["state"].items()
    return {**saved, "state": {i: {k: v for k, v in state.items() if k != MASTER} for i, state in states}}


class MasterWeights:
    """Lends fp32 values to steps."""

    def __init__(self) -> None:
        self._stepped = StandIns()

    @torch.no_grad()
    def make(self, optimizer: Optimizer, parameter: nn.Parameter, own: Tensor) -> bool:
        """Make the master weights of a part in host memory; returns whether there were none."""
        if MASTER in optimizer.state.get(parameter, {}):
            return False
        optimizer.state[parameter][MASTER] = own.to("cpu", torch.float32)
        return True

    @torch.no_grad()
    def checkout(
        self, optimizer: Optimizer, parameter: nn.Parameter, own: Tensor, *, follows: bool = True
    ) -> nn.Parameter:
        """The fp32 parameter to step, taken out of the optimizer's state.

        Args:
            own: The 16-bit part of the parameter.
            follows: Whether master weights follow it; else the caller has them do so.
        """
        values = self._taken(optimizer, parameter)
        if values is None or values.shape != own.shape:
            values = own.float()
        elif follows:
            refresh_master(values, own)
        return self._stepped.of(parameter, values)

    def _taken(self, optimizer: Optimizer, parameter: nn.Parameter) -> Tensor | None:
        state = optimizer.state.get(parameter)
        if state is None or MASTER not in state:
            return None
        values: Tensor = state.pop(MASTER)
        if not state:
            del optimizer.state[parameter]
        return values

    @torch.no_grad()
    def commit(self, optimizer: Optimizer, parameter: nn.Parameter, own: Tensor, *, rounds: bool = True) -> None:
        """Round what was stepped into the 16-bit part; the optimizer's state is that of the parameter again.

        Args:
            rounds: Whether master weights are rounded; else the caller has done it.
        """
        values = self._stepped.let_go(parameter)
        if rounds:
            own.copy_(values)
        optimizer.state[parameter][MASTER] = values


def refresh_master(values: Tensor, own: Tensor) -> None:
    """Change master weights where the 16-bit part, on their device, is no longer what they round to.

    Compared by value, as version counters do not tell of what is written to ``parameter.data``.
    """
    rounded = values.to(own.dtype)
    if own.device.type == "cpu" and torch.equal(rounded, own):  # elsewhere the host would wait for the answer
        return
    torch.where(rounded == own, values, own, out=values)
