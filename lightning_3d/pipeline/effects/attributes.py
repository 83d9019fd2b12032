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
changes inside of objects other than lists, dicts, sets, deques and tensors. Buffers are entries of a dict like any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.model.containers import CONTAINERS, content_of, refill
from lightning_3d.model.pytrees import is_same
from lightning_3d.model.snapshot import Snapshot
from lightning_3d.pipeline.effects.effect import Effect, StepContext
from lightning_3d.pipeline.effects.merge import unseen
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.torch_internals.modules import BUFFERS, UNSAVED_BUFFERS
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

_FRAMEWORK_NAMES = frozenset(vars(LightningModule())) - {BUFFERS, UNSAVED_BUFFERS} | {"log", "forward"}
_MISSING = object()
_How = Literal["set", "extend", "copy", "remove"]
_Name = tuple[str, str]
"""FQN of a module and name of an attribute."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One attribute, or an entry in it, that a step changed."""

    module: str
    """FQN."""
    path: tuple[Any, ...]
    """Name of the attribute, then keys of dicts in it."""
    how: _How
    """``"extend"`` a list, deque or set; ``"copy"`` into the tensor that is there."""
    new: object
    """The new value, or the new entries; plain dicts, lists and sets."""


class Attributes(Effect):
    """The attributes of the modules outside of blocks."""

    def __init__(self, module: LightningModule, blocks: Iterable[nn.Module]) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        inside |= {id(m) for metric in metrics_of(module).values() for m in metric.modules()}
        self._module = module
        self._owners = {fqn: m for fqn, m in module.named_modules() if id(m) not in inside}
        self._snapshot = Snapshot(())
        self._before: dict[str, dict[str, object]] = {}
        self._found: dict[_Name, object] = {}  # by the present microbatch; containers copied, tensors as they are
        self._in_place: set[int] = set()  # ids of tensors that were changed in place
        self._code: dict[_Name, object] = {}  # classes and functions that the present step set

    @property
    @override
    def has_side_effects(self) -> bool:
        return self._snapshot.differs()

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._snapshot = Snapshot(self._owners.values(), ignored=_FRAMEWORK_NAMES)
        self._before = {fqn: _attributes(owner) for fqn, owner in self._owners.items()}
        self._in_place, self._code = set(), {}
        yield

    @override
    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        try:
            yield
        finally:
            self._found = {}
            self._snapshot.restore()

    @override
    def collect(self, context: StepContext) -> dict[_Name, object]:
        for fqn, owner in self._owners.items():
            before, now = self._before[fqn], _attributes(owner)
            for name in dict.fromkeys((*before, *now)):
                value = now.get(name, _MISSING)
                if value is before.get(name, _MISSING) and not self._snapshot.may_differ(value):
                    continue
                if isinstance(value, (type, FunctionType)):
                    self._code[fqn, name] = value
                elif context.is_last:
                    self._found[fqn, name] = self._copied(value)
        return self._found

    def _copied(self, value: object) -> object:
        """A copy of containers, as plain ones; tensors and what is new of other classes as they are."""
        if type(value) is tuple:
            return tuple(map(self._copied, value))
        if not isinstance(value, CONTAINERS) or not (type(value) in CONTAINERS or self._snapshot.may_differ(value)):
            return value
        content = content_of(value)
        if isinstance(content, dict):
            return {key: self._copied(entry) for key, entry in content.items()}
        return list(map(self._copied, content)) if isinstance(content, list) else content

    @override
    def kept(self, found: dict[_Name, object]) -> dict[_Name, object]:
        present, spec = tree_flatten(self._found)
        kept: dict[_Name, object] = tree_unflatten(list(map(self._settled, present, tree_leaves(found))), spec)
        return kept

    def _settled(self, present: object, value: Any) -> object:
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
    def join(self, stage: int, found: Sequence[dict[_Name, object]], sizes: Sequence[int]) -> list[Change]:
        changes: list[Change] = []
        for of_run in found:
            for (fqn, name), new in of_run.items():
                changes += self._changes(fqn, (name,), self._before[fqn].get(name, _MISSING), new)
        if len(found) > 1 and changes:
            raise unseen(f"a change of {_named(changes[0])}")
        return changes

    def _changes(self, fqn: str, path: tuple[object, ...], before: object, after: object) -> list[Change]:
        if is_same(before, after):
            return []
        if isinstance(before, dict) and isinstance(after, dict) and after.keys() >= before.keys():
            entries = [((*path, key), before.get(key, _MISSING), new) for key, new in after.items()]
            return [change for entry in entries for change in self._changes(fqn, *entry)]
        how: _How = "remove" if after is _MISSING else "copy" if id(before) in self._in_place else "set"
        new = None if after is _MISSING else after
        if isinstance(before, (list, deque)) and isinstance(after, list) and len(after) > len(before):
            if all(map(is_same, before, after)):
                how, new = "extend", after[len(before) :]
        elif isinstance(before, set) and isinstance(after, set) and after >= before:
            how, new = "extend", after - before
        return [Change(module=fqn, path=path, how=how, new=new)]

    @override
    def apply(self, merged: Sequence[Change], *, is_own: bool) -> None:
        for (fqn, name), value in self._code.items():
            setattr(self._owners[fqn], name, value)
        for change in merged:
            new = tree_map_only(Tensor, lambda tensor: tensor.to(self._module.device), change.new)
            holder: Any = vars(self._owners[change.module])
            *outer, key = change.path
            for name in outer:
                holder = holder[name]
            present: Any = holder.get(key)
            if change.how == "remove":
                del holder[key]
            elif change.how == "copy":
                present.detach().copy_(new)
            elif change.how == "extend":
                (present.update if isinstance(present, set) else present.extend)(new)
            elif isinstance(present, CONTAINERS) and type(new) in (dict, list, set) and type(present) is not type(new):
                refill(present, new)
            else:
                holder[key] = new


def _named(change: Change) -> str:
    name, *keys = change.path if change.path[0] != BUFFERS else change.path[1:]
    return ".".join(["self", *filter(None, [change.module]), str(name)]) + "".join(f"[{key!r}]" for key in keys)


def _attributes(module: nn.Module) -> dict[str, object]:
    """The author's own plain attributes, and the dict of buffers."""
    return {name: value for name, value in vars(module).items() if name not in _FRAMEWORK_NAMES}
