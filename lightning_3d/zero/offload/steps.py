"""Optimizers step windows of parameters in host memory, one after the other, as one step.

Each window is stepped by the optimizer's own code, without its hooks; the last one is left to the call of ``step`` that
is under way, whose hooks, profiler and result belong to the step as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.distributed.agreement import raise_alike
from lightning_3d.errors import OffloadError, StepError
from lightning_3d.torch_internals.optimizers import step_without_hooks
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.zero.master_weights import follow
from lightning_3d.zero.offload.copies import HostCopies, Lent
from lightning_3d.zero.offload.states import OffloadedStates
from lightning_3d.zero.offload.store import Advice, Store
from lightning_3d.zero.offload.windows import Part, Piece, deal
from lightning_3d.zero.optimizer_kind import OptimizerKind


class OffloadedSteps:
    """Steps optimizers whose states lie in a store.

    Args:
        store: Of states.
        parameters: Of parameters that do not lie on the device, if there are such.
        window_bytes: Bytes of parameters that are stepped at a time.
        device: The strategy's.
        kinds: How much of a parameter each optimizer has to see.
    """

    def __init__(
        self,
        store: Store,
        parameters: Store,
        *,
        window_bytes: float,
        device: torch.device,
        kinds: Mapping[Optimizer, OptimizerKind],
    ) -> None:
        self._stores, self._window_bytes = (store, parameters), window_bytes
        self._kinds = kinds
        self._states, self._copies = OffloadedStates(store), HostCopies(device)
        self._stepped: dict[tuple[nn.Parameter, int], nn.Parameter] = {}  # the same in every step
        self._failure: OffloadError | None = None

    @property
    def can_fail(self) -> bool:
        """Whether room may be missing."""
        return any(store.can_fail for store in self._stores)

    @torch.no_grad()
    def bring_home(self, optimizer: Optimizer, *only: nn.Parameter) -> None:
        """Move the states that an optimizer has, of all parameters or only of some, to the store."""
        for parameter in only or [p for p in optimizer.state if isinstance(p, nn.Parameter)]:
            state = optimizer.state[parameter]
            self._states.bring_home(optimizer, parameter)
            held = [value for value in tree_leaves(state) if isinstance(value, Tensor)]
            self._advise(held, Advice.NOT_FOR_A_WHILE)

    @torch.no_grad()
    def enter(self, optimizer: Optimizer, parts: Sequence[Part], *closure: KnownLoss) -> Window:
        """Step all windows but the last, which is in the optimizer's groups afterwards, until its ``back``.

        Args:
            closure: Of the step, if it has one.
        """
        pieces = deal(parts, self._window_bytes, by_rows=self._kinds[optimizer] == "rows")
        settings = [dict(group) for group in optimizer.param_groups]
        self._copies.begin()
        lent = self._fetch(pieces[0])
        for following in pieces[1:]:
            window, lent = self._open(optimizer, lent), self._fetch(following)
            try:
                step_without_hooks(optimizer, *(known.again() for known in closure))
            finally:
                window.back()
            for group, before in zip(optimizer.param_groups, settings, strict=True):
                group.clear()  # a step counted in the group is one step
                group.update(before)
            if self._failure is not None:
                return self._open(optimizer, self._copies.fetch(()))
        return self._open(optimizer, lent)

    def _fetch(self, pieces: Sequence[Piece]) -> Lent:
        self._advise(self._held(pieces), Advice.SOON)
        return self._copies.fetch(pieces)

    def _open(self, optimizer: Optimizer, lent: Lent) -> Window:
        lent.wait()
        self._advise(self._held(lent.pieces), Advice.WRITTEN_NOW)
        for piece, values in zip(lent.pieces, lent.values, strict=True):
            if piece.rounded is not None:
                follow(values, lent.rounded[piece])
        stepped = [self._parameter(*values) for values in zip(lent.pieces, lent.values, lent.gradients, strict=True)]
        window = Window(optimizer, lent.pieces, stepped, partial(self._close, optimizer, lent, stepped))
        try:
            for piece, parameter in zip(lent.pieces, stepped, strict=True):
                self._states.lend(optimizer, piece, parameter)
        except OffloadError as error:
            window.back()
            self._failure = error
            return Window(optimizer, (), (), lambda: None)
        return window

    def _parameter(self, piece: Piece, values: Tensor, gradient: Tensor) -> nn.Parameter:
        part = piece.part.values
        key = piece.part.parameter, 0 if piece.rows is None else piece.rows.start
        stepped = self._stepped.setdefault(key, nn.Parameter(values, requires_grad=part.requires_grad))
        stepped.grad = None
        stepped.data = values
        stepped.grad = gradient.to(values.dtype)
        vars(stepped).update(vars(part))
        return stepped

    @torch.no_grad()
    def _close(self, optimizer: Optimizer, lent: Lent, stepped: Sequence[nn.Parameter]) -> None:
        self._copies.give_back(lent)
        try:
            for piece, parameter in zip(lent.pieces, stepped, strict=True):
                parameter.grad = None
                self._states.take_back(optimizer, piece, parameter)
        except OffloadError as error:
            self._failure = error
        self._advise(self._held(lent.pieces), Advice.NOT_FOR_A_WHILE)

    def _held(self, pieces: Sequence[Piece]) -> list[Tensor]:
        return [t for piece in pieces for t in (piece.values, *self._states.of(piece))]

    def _advise(self, tensors: Sequence[Tensor], advice: Advice) -> None:
        for store in self._stores:
            store.advise(tensors, advice)

    def finish(self) -> None:
        """After a step; every rank calls it.

        Raises:
            OffloadError: a store had no room, on any rank.
        """
        self._copies.finish()
        failure, self._failure = self._failure, None
        if self.can_fail:
            raise_alike(failure)


class KnownLoss:
    """A closure for the steps of windows: the user's has run, and may not run again."""

    def __init__(self, optimizer: Optimizer, loss: object) -> None:
        self._optimizer, self._loss, self._is_used = optimizer, loss, False

    def again(self) -> KnownLoss:
        """The same for another window."""
        return KnownLoss(self._optimizer, self._loss)

    def __call__(self) -> object:
        if self._is_used:
            raise repeated_closure(self._optimizer)
        self._is_used = True
        return self._loss


def repeated_closure(optimizer: Optimizer) -> StepError:
    """The error for a closure that is called again after parameters have been stepped."""
    return StepError(
        f"{type(optimizer).__name__} calls its closure several times in a step, but with zero.offload_optimizer its"
        " parameters are stepped in windows after the first call. Use zero.offload_optimizer='none', or another"
        " optimizer."
    )


class Window:
    """Pieces in an optimizer's groups, in place of the module's parameters."""

    def __init__(
        self, optimizer: Optimizer, pieces: Sequence[Piece], stepped: Sequence[nn.Parameter], close: Callable[[], None]
    ) -> None:
        self._optimizer, self._close = optimizer, close
        self._originals = [group["params"] for group in optimizer.param_groups]
        pairs = list(zip(pieces, stepped, strict=True))
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [parameter for piece, parameter in pairs if piece.part.group == index]

    def back(self) -> None:
        """Put the module's parameters back."""
        for group, parameters in zip(self._optimizer.param_groups, self._originals, strict=True):
            group["params"] = parameters
        self._close()
