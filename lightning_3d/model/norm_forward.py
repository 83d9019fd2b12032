"""Wraps the forward of a norm for a while; inside of the block's patch, if the norm is a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from lightning_3d.model.block_runner import ForwardWrapper, runner_of
from lightning_3d.torch_internals.patches import replaced


class NormForward:
    """Takes the place of a norm's forward.

    Args:
        forward_wrapper: Runs the norm's own forward with its arguments.
    """

    def __init__(self, norm: nn.Module, forward_wrapper: ForwardWrapper) -> None:
        self.norm = norm
        self._around, self._own = forward_wrapper, norm.forward

    def __call__(self, *args: object, **kwargs: object) -> object:
        """In place of ``norm.forward(...)``."""
        return self._around(self._own, args, kwargs)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take its place inside."""
        runner = runner_of(self.norm)
        owner, name = (self.norm, "forward") if runner is None else (runner, "own_forward")
        self._own = getattr(owner, name)
        with replaced("forwards of norms", owner, {name: self}):
            yield


def is_watched(module: nn.Module) -> bool:
    """Whether somebody sees the calls of a norm."""
    runner = runner_of(module)
    return isinstance(vars(module).get("forward") if runner is None else runner.own_forward, NormForward)
