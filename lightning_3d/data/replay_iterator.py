"""Looking at the first batch of a dataloader, which goes on as if nobody had.

Dataloaders, samplers and datasets may keep where they are: in attributes, in lists, in generators of random numbers and
in open files. All of that is put back. An iterator, as of a generator function, can't be; one that gives again what
was taken of it takes its place.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from contextlib import ExitStack, contextmanager
from itertools import tee
from typing import Any

from lightning_3d.data.held_generators import held_by
from lightning_3d.distributed.generator_states import is_generator, states_kept
from lightning_3d.model.containers import CONTAINERS
from lightning_3d.model.snapshot import Snapshot


class ReplayIterator(Iterator[object]):
    """An iterator, which may be its own dataloader, that can be looked at without losing what it gave."""

    def __init__(self, iterator: Iterator[object]) -> None:
        self._iterator = iterator

    def __next__(self) -> object:
        return next(self._iterator)

    @contextmanager
    def looked_at(self) -> Iterator[None]:
        """Batches that it gives inside, it gives again afterwards."""
        before, self._iterator = tee(self._iterator)
        try:
            yield
        finally:
            self._iterator = before


def is_used_up(loader: object) -> bool:
    """Whether it is an iterator that nothing puts back: a generator, say."""
    return isinstance(loader, Iterator) and not hasattr(loader, "__dict__") and not isinstance(loader, io.IOBase)


@contextmanager
def restored(loader: object) -> Iterator[None]:
    """Let batches of a dataloader be fetched inside; afterwards it is as before."""
    held = list(held_by(loader))
    with ExitStack() as stack:
        if isinstance(loader, ReplayIterator):
            stack.enter_context(loader.looked_at())
        for value in held:
            if isinstance(value, io.IOBase):
                if not value.closed and value.seekable():
                    stack.callback(value.seek, value.tell())
            elif not is_generator(value):
                _peek_into(value, stack)
        stack.callback(Snapshot([value for value in held if hasattr(value, "__dict__")], with_data=False).restore)
        stack.enter_context(states_kept([value for value in held if is_generator(value)]))
        yield


def _peek_into(value: object, stack: ExitStack) -> None:
    """Look at the iterators in a container, or among the attributes of an object, that nothing puts back."""
    container: Any = value if isinstance(value, CONTAINERS) else getattr(value, "__dict__", ())
    keys: Iterable[Any] = range(len(container)) if isinstance(container, MutableSequence) else ()
    for key in list(container) if isinstance(container, MutableMapping) else keys:
        if is_used_up(container[key]):
            container[key] = peeked = ReplayIterator(container[key])
            stack.enter_context(peeked.looked_at())
