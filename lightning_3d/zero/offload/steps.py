"""Optimizers step windows of parameters in host memory, one after the other, as one step.

Each window is stepped by the optimizer's own code, without its hooks; the last one is left to the call of ``step`` that
is under way, whose hooks, profiler and result belong to the step as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.torch_internals.optimizers import step_without_hooks
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.master_weights import refresh_master
from lightning_3d.zero.offload.copies import HostCopies, Lent
from lightning_3d.zero.offload.states import OffloadedStates
from lightning_3d.zero.offload.store import Advice, Store
from lightning_3d.zero.offload.windows import Part, deal
from lightning_3d.zero.optimizer_kind import is_known
from lightning_3d.zero.swapped import StandIns, Swapped


class OffloadedSteps:
    """Steps optimizers whose states lie in a store.

    Args:
        store: Of states.
        parameters: Of parameters that do not lie on the device, if there are such.
        window_bytes: Bytes of parameters that are stepped at a time.
        device: The strategy's.
    """

    def __init__(self, store: Store, parameters: Store, *, window_bytes: float, device: torch.device) -> None:
        self._stores, self._window_bytes = (store, parameters), window_bytes
        self._states, self._copies = OffloadedStates(store), HostCopies(device)
        self._stepped = StandIns()

    @torch.no_grad()
    def to_host(self, optimizer: Optimizer, *only: nn.Parameter) -> None:
        """Move the states that an optimizer has, of all parameters or only of some, to the store."""
        for parameter in only or [p for p in optimizer.state if isinstance(p, nn.Parameter)]:
            state = optimizer.state[parameter]
            self._states.to_host(optimizer, parameter)
            held = [value for value in tree_leaves(state) if isinstance(value, Tensor)]
            self._advise(held, Advice.NOT_FOR_A_WHILE)

    @torch.no_grad()
    def enter(self, optimizer: Optimizer, parts: Sequence[Part]) -> Swapped:
        """Step all windows but the last, which is in the optimizer's groups afterwards, until `Swapped.back`.

        Optimizers that may count their calls or look at several parameters, as others than torch's, have one window.

        Raises:
            OffloadError: a store had no room.
        """
        windows = deal(parts, self._window_bytes if is_known(optimizer) else float("inf"))
        self._copies.begin()
        lent = self._fetch(windows[0])
        for following in windows[1:]:
            window, lent = self._open(optimizer, lent), self._fetch(following)
            try:
                step_without_hooks(optimizer)
            finally:
                window.back()
        return self._open(optimizer, lent)

    def _fetch(self, parts: Sequence[Part]) -> Lent:
        self._advise(self._held(parts), Advice.SOON)
        return self._copies.fetch(parts)

    def _open(self, optimizer: Optimizer, lent: Lent) -> Swapped:
        lent.wait()
        self._advise(self._held(lent.parts), Advice.WRITTEN_NOW)
        for part in lent.on_host:
            if part.rounded is not None:
                refresh_master(part.values, part.rounded)
        stepped: dict[nn.Parameter, nn.Parameter | None] = {
            parameter: None for group in optimizer.param_groups for parameter in group["params"]
        }
        for part in lent.on_host:
            self._states.to_host(optimizer, part.parameter)
            stepped[part.parameter] = stand_in = self._stepped.of(part.parameter, part.values)
            stand_in.grad = part.gradient.to(part.values.dtype)
        return Swapped(optimizer, stepped, partial(self._close, optimizer, lent))

    @torch.no_grad()
    def _close(self, optimizer: Optimizer, lent: Lent) -> None:
        self._copies.give_back(lent)
        for part in lent.parts:
            self._stepped.let_go(part.parameter)
            self._states.to_host(optimizer, part.parameter)
        self._advise(self._held(lent.parts), Advice.NOT_FOR_A_WHILE)

    def _held(self, parts: Sequence[Part]) -> list[Tensor]:
        return [t for part in parts for t in (part.values, *self._states.of(part.parameter))]

    def _advise(self, tensors: Sequence[Tensor], advice: Advice) -> None:
        for store in self._stores:
            store.advise(tensors, advice)

    def finish(self) -> None:
        """After a step."""
        self._copies.finish()
