"""Collectives that an optimizer makes by itself, as a distributed Muon that shares its work among the ranks of DDP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from typing_extensions import override

from lightning_3d.distributed.around_collectives import COLLECTIVES
from lightning_3d.torch_internals.dispatch import Operator, TorchDispatchMode
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import Args, Kwargs

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class CollectiveError(Exception):
    """An optimizer was about to communicate in a trial, which one rank runs alone."""


class NoCollectives(TorchDispatchMode):
    """Raises `CollectiveError` in place of every collective."""

    @override
    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if func.namespace in _NAMESPACES:
            raise CollectiveError
        return func(*args, **(kwargs or {}))


@contextmanager
def before_collectives(call: Callable[[], None]) -> Iterator[None]:
    """Call a function before each collective that Python code makes inside; it may raise in its place."""

    def shown(original: Callable[..., object]) -> Callable[..., object]:
        def collective(group: dist.ProcessGroup, *args: object, **kwargs: object) -> object:
            call()
            return original(group, *args, **kwargs)

        return collective

    new = {name: shown(getattr(dist.ProcessGroup, name)) for name in COLLECTIVES}
    with replaced("collectives of optimizers", dist.ProcessGroup, new):
        yield
