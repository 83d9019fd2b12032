"""Changes of a step to the module's own attributes: lists that grow, counters, running values.

Glue runs once per microbatch, and on every stage up to where it leaves; in one process it runs once per batch. So every
microbatch starts with the attributes of before the step and leaves them so. If a step changes them, its code after the
blocks runs once on the whole batch, and what that changed is applied on all ranks.

    before              after the step            applied
    outputs = [a]       [a, b]                    outputs.append(b)
    total = 3.0         3.0 + x                   total = 3.0 + x

Classes and functions that a step makes and keeps are no values of the batch, and can't be sent: each rank keeps what
its last microbatch made, where its part of the step came to it.

Left alone: modules inside of blocks, which run on one stage only; parameters; metrics (see ``metrics.py``); what
changes inside of objects other than lists, dicts, sets, deques and tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.pytrees import is_same
from lightning_3d.model.snapshot import CONTAINERS, Snapshot, refill
from lightning_3d.pipeline.effects.effect import Effect, Place
from lightning_3d.pipeline.effects.join import unseen
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.torch_internals.modules import BUFFERS, buffers_of
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten

_FRAMEWORK_NAMES = frozenset(vars(LightningModule())) - {BUFFERS} | {"log", "forward"}
_HIDDEN_NAMES = _FRAMEWORK_NAMES | {BUFFERS}
_DICTS = (dict, defaultdict, OrderedDict, Counter)
_LISTS = (list, deque)
_MISSING = object()
_Name = tuple[str, str]
"""FQN of a module and name of an attribute."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One attribute, or an entry in it, that a step changed."""

    module: str
    """FQN."""
    path: tuple[Any, ...]
    """Name of the attribute, then keys and indices of containers in it."""
    how: Literal["set", "extend", "copy", "remove", "register", "register unsaved"]
    """``"extend"`` a list, deque or set; ``"copy"`` into the tensor that is there; ``"register"`` a buffer, which
    checkpoints have or not."""
    new: Any
    """The new value, or the new entries."""


class Attributes(Effect):
    """The attributes of the modules outside of blocks."""

    def __init__(self, module: LightningModule, blocks: Iterable[nn.Module]) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        inside |= {id(m) for metric in metrics_of(module).values() for m in metric.modules()}
        self._module = module
        self._owners = {fqn: m for fqn, m in module.named_modules() if id(m) not in inside}
        self._snapshot = Snapshot(())
        self._before: dict[str, dict[str, Any]] = {}
        self._found: dict[_Name, Any] = {}  # by the present microbatch; containers copied, tensors as they are
        self._in_place: set[int] = set()  # ids of tensors that were changed in place
        self._code: dict[_Name, Any] = {}  # classes and functions that the present step set
        self._registered: dict[_Name, bool] = {}  # buffers new in the present step -> whether checkpoints have them

    @property
    @override
    def gives_more(self) -> bool:
        return self._snapshot.differs()

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._snapshot = Snapshot(self._owners.values(), ignored=_FRAMEWORK_NAMES)
        self._before = {fqn: _attributes(owner) for fqn, owner in self._owners.items()}
        self._in_place, self._code, self._registered = set(), {}, {}
        yield

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        try:
            yield
        finally:
            self._found = {}
            self._snapshot.restore()

    @override
    def collect(self, place: Place) -> dict[_Name, Any]:
        for fqn, owner in self._owners.items():
            before = self._before[fqn]
            made = {name: value for name, value in vars(owner).items() if _is_code(value)}
            self._code |= {(fqn, name): value for name, value in made.items() if value is not before.get(name)}
        if not place.is_last:
            return {}
        for fqn, owner in self._owners.items():
            before, now = self._before[fqn], _attributes(owner)
            registered = buffers_of(owner).keys() & now.keys() - before.keys()
            self._registered |= {(fqn, name): name in owner.state_dict() for name in registered}
            for name in dict.fromkeys((*before, *now)):
                value = now.get(name, _MISSING)
                if (fqn, name) in self._code:
                    continue
                if value is not before.get(name, _MISSING) or self._snapshot.may_differ(value):
                    self._found[fqn, name] = _map(value, other=self._followed)
        return self._found

    def _followed(self, value: Any) -> Any:
        is_other = isinstance(value, CONTAINERS) and type(value) not in (*_DICTS, *_LISTS, set)
        return _Refused(type(value).__name__) if is_other and self._snapshot.is_refilled(value) else value

    @override
    def kept(self, found: dict[_Name, Any]) -> dict[_Name, Any]:
        present, spec = tree_flatten(self._found)
        kept: dict[_Name, Any] = tree_unflatten(list(map(self._settled, present, tree_leaves(found))), spec)
        return kept

    def _settled(self, present: Any, value: Any) -> Any:
        """A value that later microbatches don't change.

        Args:
            present: The attribute, or what is in it.
            value: The data behind it.
        """
        if not isinstance(present, Tensor) or isinstance(present, nn.Parameter):
            return present
        if not self._snapshot.has_data_of(present):
            return value if value is present and not value.requires_grad else value.detach()
        if value is present and not self._snapshot.is_changed(present):
            return value
        self._in_place.add(id(present))
        return value.detach().clone()

    @override
    def join(self, stage: int, found: Sequence[dict[_Name, Any]], sizes: Sequence[int]) -> list[Change]:
        changes = [change for after in found for change in self._changes_of(after)]
        if len(found) > 1 and changes:
            raise unseen(f"a change of {_named(changes[0].module, changes[0].path)}")
        return changes

    def _changes_of(self, after: dict[_Name, Any]) -> list[Change]:
        pairs = [(name, self._before[name[0]].get(name[1], _MISSING), new) for name, new in after.items()]
        return [change for (fqn, name), old, new in pairs for change in self._changes(fqn, (name,), old, new)]

    @override
    def apply(self, joined: Sequence[Change], *, is_own: bool) -> None:
        for (fqn, name), value in self._code.items():
            setattr(self._owners[fqn], name, value)
        for change in joined:
            new = _map(change.new, lambda tensor: tensor.to(self._module.device))
            if change.how in ("register", "register unsaved"):
                owner, is_saved = self._owners[change.module], change.how == "register"
                owner.register_buffer(change.path[0], new, persistent=is_saved)
                continue
            holder: Any = _holder(self._owners[change.module], change.path[0])
            for key in change.path[:-1]:
                holder = holder[key]
            present: Any = holder.get(change.path[-1]) if isinstance(holder, dict) else holder[change.path[-1]]
            if change.how == "remove":
                del holder[change.path[-1]]
            elif change.how == "set" and type(present) in (deque, defaultdict, OrderedDict, Counter):
                refill(present, new)
            elif change.how == "set":
                holder[change.path[-1]] = new
            elif change.how == "copy":
                present.detach().copy_(new)
            elif isinstance(new, set):
                present.update(new)
            else:
                present.extend(new)

    def _changes(self, fqn: str, path: tuple[Any, ...], before: Any, after: Any) -> list[Change]:
        if is_same(before, after):
            return []
        if isinstance(before, dict) and isinstance(after, dict) and after.keys() >= before.keys():
            absent = 0 if isinstance(before, Counter) else _MISSING
            pairs = [(key, before.get(key, absent), new) for key, new in after.items()]
            return [change for key, old, new in pairs for change in self._changes(fqn, (*path, key), old, new)]
        if isinstance(before, _LISTS) and isinstance(after, _LISTS) and _begins(after, before):
            inner = enumerate(zip(before, after, strict=False))
            found = [change for i, (old, new) in inner for change in self._changes(fqn, (*path, i), old, new)]
            if added := list(after)[len(before) :]:
                found.append(Change(module=fqn, path=path, how="extend", new=added))
            return found
        if isinstance(before, set) and isinstance(after, set) and after >= before:
            return [Change(module=fqn, path=path, how="extend", new=after - before)]
        if after is _MISSING:
            return [Change(module=fqn, path=path, how="remove", new=None)]
        if isinstance(after, _Refused):
            raise StepError(
                f"A step changed what is in {_named(fqn, path)}, a {after.kind}. With a pipeline the last stage does,"
                " and tells the others of changes in lists, dicts, sets and deques only: use one of these."
            )
        if before is _MISSING and (is_saved := self._registered.get((fqn, path[0]))) is not None:
            return [Change(module=fqn, path=path, how="register" if is_saved else "register unsaved", new=after)]
        return [Change(module=fqn, path=path, how="copy" if id(before) in self._in_place else "set", new=after)]


def _named(fqn: str, path: tuple[Any, ...]) -> str:
    return ".".join(["self", *filter(None, [fqn]), str(path[0])]) + "".join(f"[{key!r}]" for key in path[1:])


def _is_code(value: Any) -> bool:
    return isinstance(value, (type, FunctionType))


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Buffers and the author's own plain attributes."""
    own = {name: value for name, value in vars(module).items() if name not in _HIDDEN_NAMES}
    return own | {name: buffer for name, buffer in buffers_of(module).items() if buffer is not None}


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict that the attribute is in."""
    return buffers_of(module) if name in buffers_of(module) else vars(module)


@dataclass(frozen=True)
class _Refused:
    """Stands for a changed container of a class that is not known."""

    kind: str


def _same(value: Any) -> Any:
    return value


def _map(value: Any, change: Callable[[Tensor], Tensor] = _same, other: Callable[[Any], Any] = _same) -> Any:
    """A copy with other tensors; deques become lists, all dicts plain ones. ``other`` is for all other leaves."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else change(value)
    if type(value) in _DICTS:
        return {key: _map(entry, change, other) for key, entry in value.items()}
    if type(value) in _LISTS:
        return [_map(entry, change, other) for entry in value]
    if type(value) is tuple:
        return tuple(_map(entry, change, other) for entry in value)
    return set(value) if type(value) is set else other(value)


def _begins(after: Sequence[Any], before: Sequence[Any]) -> bool:
    """Whether the leaves that were in a list are still there."""
    kinds: tuple[Any, ...] = (dict, _LISTS, set)
    return len(after) >= len(before) and all(
        is_same(old, new) or any(isinstance(old, kind) and isinstance(new, kind) for kind in kinds)
        for old, new in zip(before, after, strict=False)
    )
