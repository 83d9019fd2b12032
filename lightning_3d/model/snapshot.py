"""State of modules at one time, to put it back: planning, tracing and microbatches run a user's code whose changes must
not stay.

Covers attributes that are set or removed (parameters, buffers, hooks and training flags among them), what changes in
the lists, dicts, sets and deques that they refer to, however deep, and the data of buffers and plain tensors. Tensors
in lists are results of earlier steps, whose data is not kept. ``preserved`` also covers attributes of objects of the
author's own classes (an agent, a buffer), random generators among the attributes of modules, and tensors that their
code keeps outside of them (`code_caches`). What changes inside of other objects stays changed.

Only what changed is touched, and by the methods of the built-in classes: a frozen dict refuses its own ``update``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.distributed.generator_states import generators_of, states_kept
from lightning_3d.model.code_caches import CodeCaches
from lightning_3d.model.containers import CONTAINERS, content_of, is_filled_with, refill
from lightning_3d.torch_internals.modules import BUFFERS
from lightning_3d.torch_internals.tensors import version_of

_SIMPLE = frozenset({bool, int, float, complex, str, bytes, type(None), Tensor, nn.Parameter})
"""Classes of entries that nothing needs to be kept of, in a list."""


_OF_NOTHING = frozenset({"builtins", "abc", "typing"})
"""Modules whose classes are bases of any."""

MOST_FOLLOWED = 10_000
"""Entries of a container up to which they are looked into, inside of objects: more are data."""


class Snapshot:
    """The state of modules as it is now.

    Args:
        modules: Or other objects with attributes; modules inside of them are not covered.
        ignored: Names of attributes to leave alone.
        with_data: Whether to keep the data of tensors too, if they are not in other objects; or of which.
        package: Name of the top-level package, or script, whose objects' attributes are kept, too; empty for none.
    """

    def __init__(
        self,
        modules: Iterable[object],
        *,
        ignored: frozenset[str] = frozenset(),
        with_data: bool | Callable[[Tensor], bool] = True,
        package: str = "",
    ) -> None:
        self._ignored, self._with_data, self._package = ignored, with_data, package
        self._is_in_object = False  # the present value
        self._objects: list[object] = []  # to be looked into, one after the other: a chain of them may be long
        self._saved: dict[int, _Container | _Data | None] = {}  # None while what is inside of it is looked at
        self._owners = [(vars(module), self._kept(vars(module))) for module in modules]
        for _, attributes in self._owners:
            for name, value in attributes.items():
                self._save_buffers(value) if name == BUFFERS else self._save(value)
        self._is_in_object = True
        while self._objects:
            self._save(getattr(self._objects.pop(), "__dict__", None))

    def restore(self, *, unseen: bool = False) -> None:
        """Put back what changed since.

        Args:
            unseen: Whether to copy data back also where torch counted no change, as of one through ``tensor.data``.
        """
        for attributes, before in self._owners:
            if not is_filled_with(now := self._kept(attributes), before):
                for name in now.keys() - before.keys():
                    del attributes[name]
                attributes.update(before)
        for saved in self._saved.values():
            if isinstance(saved, _Data):
                saved.restore(unseen=unseen)
            elif saved is not None:
                saved.restore()

    def differs(self) -> bool:
        """Whether anything changed since, as far as torch counts changes of tensors."""
        owners = any(not is_filled_with(self._kept(attributes), before) for attributes, before in self._owners)
        return owners or any(saved is not None and saved.is_changed() for saved in self._saved.values())

    def has_data_of(self, tensor: Tensor) -> bool:
        """Whether the data of a tensor was kept."""
        return isinstance(self._saved.get(id(tensor)), _Data)

    def is_changed(self, tensor: Tensor) -> bool:
        """Whether a tensor, whose data was kept, was changed in place."""
        saved = self._saved[id(tensor)]
        assert isinstance(saved, _Data)
        return saved.is_changed()

    def may_differ(self, value: object) -> bool:
        """Whether there is something else in a container now, or a tensor whose data was kept."""
        saved = self._saved.get(id(value))
        return isinstance(saved, _Data) or (saved is not None and saved.may_differ())

    def _kept(self, attributes: dict[str, object]) -> dict[str, Any]:
        if not self._ignored:
            return dict(attributes)
        return {name: value for name, value in attributes.items() if name not in self._ignored}

    def _save_buffers(self, buffers: dict[str, Tensor | None]) -> None:
        saved = _Container(buffers)
        self._saved[id(buffers)] = saved
        for buffer in buffers.values():
            if buffer is not None:
                self._save_data(buffer)
        saved.nested = [data for data in map(self._saved.get, map(id, buffers.values())) if data is not None]

    def _save(self, value: object) -> None:
        if type(value) is Tensor:
            self._save_data(value)
        elif isinstance(value, tuple):
            for entry in value:
                self._save(entry)
        elif isinstance(value, CONTAINERS) and id(value) not in self._saved:
            self._saved[id(value)] = None
            saved = _Container(value)
            for entry in saved.entries() if not self._is_in_object or len(value) <= MOST_FOLLOWED else ():
                self._save(entry)
            saved.nested = [n for n in (self._saved.get(id(entry)) for entry in saved.entries()) if n is not None]
            self._saved[id(value)] = saved
        elif self._package and is_plain_object(value, self._package):
            self._objects.append(value)

    def _save_data(self, tensor: Tensor) -> None:
        wanted = self._with_data(tensor) if callable(self._with_data) else self._with_data
        if wanted and not self._is_in_object and id(tensor) not in self._saved and not tensor.is_inference():
            self._saved[id(tensor)] = _Data(tensor)


class _Container:
    """A container and its content."""

    def __init__(self, value: object) -> None:
        self.value, self.content = value, content_of(value)
        self.nested: list[_Container | _Data] = []
        """Containers and data that were kept of its entries."""

    def entries(self) -> Iterable[object]:
        """The entries of which something may have to be kept."""
        if isinstance(self.content, set):  # hashable, so not changed in place
            return ()
        if isinstance(self.content, dict):
            return self.content.values()
        return () if _SIMPLE.issuperset(map(type, self.content)) else [e for e in self.content if type(e) is not Tensor]

    def is_changed(self) -> bool:
        return not is_filled_with(self.value, self.content)

    def may_differ(self) -> bool:
        return self.is_changed() or any(isinstance(saved, _Data) or saved.may_differ() for saved in self.nested)

    def restore(self) -> None:
        if self.is_changed():
            refill(self.value, self.content)


class _Data:
    """A tensor and its data."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.data, self._version = tensor, tensor.detach().clone(), version_of(tensor)

    def is_changed(self) -> bool:
        return version_of(self.tensor) != self._version

    def restore(self, *, unseen: bool) -> None:
        if unseen or self.is_changed():
            self.tensor.data.copy_(self.data)  # for autograd, which may have saved the tensor, nothing changes
            self._version = version_of(self.tensor)


@contextmanager
def preserved(module: nn.Module, *, without_data: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Put the state of a module, and of all modules inside of it, back afterwards.

    Autograd's anomaly mode is off inside: it would note the stack of each operator of a run that trains nothing, and
    raise at the NaN of numbers that are made up.

    Args:
        without_data: Modules inside of it whose tensors' data is not touched.
    """
    untouched = {id(inner) for outer in without_data for inner in outer.modules()}
    modules = list(module.modules())
    snapshots = [
        Snapshot((inner for inner in modules if id(inner) not in untouched), package=package_of(type(module))),
        Snapshot((inner for inner in modules if id(inner) in untouched), with_data=False),
    ]
    with (
        torch.autograd.set_detect_anomaly(False),
        states_kept(generators_of(modules)),
        CodeCaches(modules).put_back(),
    ):
        try:
            yield
        finally:
            for snapshot in snapshots:
                snapshot.restore(unseen=True)


def package_of(cls: type) -> str:
    """The first part of the name of a class's module."""
    return cls.__module__.partition(".")[0]


def is_plain_object(value: object, package: str) -> bool:
    """Whether an object's class is of a package, and derives from no other's (a Trainer, a dataset)."""
    packages = {package_of(cls) for cls in type(value).__mro__}
    return package in packages <= {package, *_OF_NOTHING}
