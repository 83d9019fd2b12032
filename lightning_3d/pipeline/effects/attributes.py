"""Changes of a step to the module's own attributes: lists that grow, counters, running values.

Glue runs once per microbatch, and on every stage up to where it leaves; in one process it runs once per batch. So every
microbatch starts with the attributes of before the step and leaves them so; what the last stage found changed is joined
over the microbatches and applied on all stages.

    before              after microbatch 0    after microbatch 1    applied
    outputs = [a]       [a, b0]               [a, b1]               outputs.append(join(b0, b1))
    total = 3.0         3.0 + x0              3.0 + x1              total = 3.0 + mean(x0, x1)
    num_samples = 8     8 + 4                 8 + 4                 num_samples = 8 + 8
    num_steps = 5       5 + 1                 5 + 1                 num_steps = 6

Classes and functions that a step makes and keeps are no values of the batch, and can't be sent: each rank keeps what
its last microbatch made, where its part of the step came to it.

Left alone: modules inside of blocks, which run on one stage only; parameters; metrics (see ``metrics.py``); what
changes inside of objects other than lists, dicts, sets, deques and tensors.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.pytrees import is_same
from lightning_3d.model.snapshot import CONTAINERS, Snapshot, refill
from lightning_3d.pipeline.effects.effect import Effect, Place
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.torch_internals.modules import BUFFERS, buffers_of

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

    def __init__(self, module: LightningModule, blocks: Iterable[nn.Module], joiner: Joiner) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        inside |= {id(m) for metric in metrics_of(module).values() for m in metric.modules()}
        self._module, self._joiner = module, joiner
        self._owners = {fqn: m for fqn, m in module.named_modules() if id(m) not in inside}
        self._snapshot = Snapshot(())
        self._before: dict[str, dict[str, Any]] = {}
        self._found: dict[_Name, Any] = {}  # by the present microbatch; containers copied, tensors as they are
        self._afters: dict[int, dict[_Name, Any]] = {}  # microbatch -> values that it may have changed
        self._in_place: set[int] = set()  # ids of tensors that were changed in place
        self._code: dict[_Name, Any] = {}  # classes and functions that the present step set
        self._registered: dict[_Name, bool] = {}  # buffers new in the present step -> whether checkpoints have them

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._snapshot = Snapshot(self._owners.values(), ignored=_FRAMEWORK_NAMES)
        self._before = {fqn: _attributes(owner) for fqn, owner in self._owners.items()}
        self._afters, self._in_place, self._code, self._registered = {}, set(), {}, {}
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
    def collect(self, place: Place) -> list[Tensor]:
        for fqn, owner in self._owners.items():
            before = self._before[fqn]
            made = {name: value for name, value in vars(owner).items() if _is_code(value)}
            self._code |= {(fqn, name): value for name, value in made.items() if value is not before.get(name)}
        if not place.is_last:
            return []
        tensors: list[Tensor] = []

        def noted(tensor: Tensor) -> Tensor:
            tensors.append(tensor)
            return tensor

        for fqn, owner in self._owners.items():
            before, now = self._before[fqn], _attributes(owner)
            registered = buffers_of(owner).keys() & now.keys() - before.keys()
            self._registered |= {(fqn, name): name in owner.state_dict() for name in registered}
            for name in dict.fromkeys((*before, *now)):
                value = now.get(name, _MISSING)
                if (fqn, name) in self._code:
                    continue
                if value is not before.get(name, _MISSING) or self._snapshot.may_differ(value):
                    self._found[fqn, name] = _map(value, noted, self._followed)
        return tensors

    def _followed(self, value: Any) -> Any:
        is_other = isinstance(value, CONTAINERS) and type(value) not in (*_DICTS, *_LISTS, set)
        return _Refused(type(value).__name__) if is_other and self._snapshot.is_refilled(value) else value

    @override
    def keep(self, place: Place, found: Sequence[Tensor]) -> None:
        following = iter(found)

        def settled(present: Tensor) -> Tensor:
            tensor = next(following)
            if not self._snapshot.has_data_of(present):
                return tensor if tensor is present and not tensor.requires_grad else tensor.detach()
            if tensor is present and not self._snapshot.is_changed(present):
                return tensor
            self._in_place.add(id(present))
            return tensor.detach().clone()

        if place.is_last:
            self._afters[place.microbatch] = {name: _map(value, settled) for name, value in self._found.items()}

    @override
    def join(self, stage: int, sizes: Sequence[int], *, is_last: bool) -> list[Change]:
        return [change for find in self._joins(sizes) for change in find()] if is_last else []

    @override
    def study(self, stage: int, sizes: Sequence[int]) -> None:
        for find in self._joins(sizes):
            with suppress(StepError):
                find()

    def _joins(self, sizes: Sequence[int]) -> Iterator[Callable[[], list[Change]]]:
        """For each attribute a function that finds its changes."""
        afters = [self._afters.pop(index) for index in range(len(sizes))]
        for fqn, name in dict.fromkeys(name for after in afters for name in after):
            before = self._before[fqn].get(name, _MISSING)
            values = [after.get((fqn, name), before) for after in afters]
            yield partial(self._changes, fqn, (name,), before, values, sizes)

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

    def _changes(
        self, fqn: str, path: tuple[Any, ...], before: Any, afters: Sequence[Any], sizes: Sequence[int]
    ) -> list[Change]:
        if all(is_same(before, after) for after in afters):
            return []
        name = ".".join(["self", *filter(None, [fqn]), str(path[0])]) + "".join(f"[{key!r}]" for key in path[1:])
        if isinstance(before, dict) and all(isinstance(a, dict) and a.keys() >= before.keys() for a in afters):
            keys = dict.fromkeys(key for after in afters for key in after)
            absent = 0 if isinstance(before, Counter) else _MISSING
            pairs = [(key, before.get(key, absent), [after.get(key, absent) for after in afters]) for key in keys]
            return [c for key, old, new in pairs for c in self._changes(fqn, (*path, key), old, new, sizes)]
        if isinstance(before, _LISTS) and all(isinstance(after, _LISTS) and _begins(after, before) for after in afters):
            inner = [(i, entry, [after[i] for after in afters]) for i, entry in enumerate(before)]
            found = [c for i, old, new in inner for c in self._changes(fqn, (*path, i), old, new, sizes)]
            added = [list(after)[len(before) :] for after in afters]
            if any(added):
                found.append(Change(module=fqn, path=path, how="extend", new=self._join_added(added, sizes, name)))
            return found
        if isinstance(before, set) and all(isinstance(after, set) and after >= before for after in afters):
            return [Change(module=fqn, path=path, how="extend", new=set().union(*afters) - before)]
        if all(after is _MISSING for after in afters):
            return [Change(module=fqn, path=path, how="remove", new=None)]
        if refused := [after for after in afters if isinstance(after, _Refused)]:
            raise StepError(
                f"A step changed what is in {name}, a {refused[0].kind}. With a pipeline each microbatch does, and"
                " the changes can be joined in lists, dicts, sets and deques only: use one of these."
            )
        if any(after is _MISSING for after in afters):
            raise StepError(f"{name} is set for some microbatches of a batch only. Set it in every step.")
        new = self._join_value(before, afters, sizes, name)
        if before is _MISSING and (is_saved := self._registered.get((fqn, path[0]))) is not None:
            return [Change(module=fqn, path=path, how="register" if is_saved else "register unsaved", new=new)]
        return [Change(module=fqn, path=path, how="copy" if id(before) in self._in_place else "set", new=new)]

    def _join_added(self, added: Sequence[list[Any]], sizes: Sequence[int], name: str) -> list[Any]:
        """New entries: either one for each sample, or parts that each stand for the batch."""
        if len(added) > 1 and self._joiner.are_rows(added, sizes, name, unknown=max(sizes) > 1):
            return [entry for entries in added for entry in entries]
        if len({len(entries) for entries in added}) > 1:
            raise StepError(
                f"The microbatches of a batch added {[len(entries) for entries in added]} entries to {name}, which are"
                " neither as many for each nor one for each sample. Add as many in every step."
            )
        columns = zip(*added, strict=True)
        return [self._joiner.join(entries, sizes, f"an entry added to {name}") for entries in columns]

    def _join_value(self, before: Any, afters: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
        if len(afters) == 1:
            return afters[0]
        is_tensor = isinstance(before, Tensor) and all(
            isinstance(a, Tensor) and a.shape == before.shape for a in afters
        )
        if is_tensor and (before.is_floating_point() or before.is_complex()):
            return self._joiner.average(afters, sizes, name)
        is_number = type(before) is int and all(type(after) is int for after in afters)
        if is_number or (is_tensor and before.dtype != torch.bool):
            return before + self._joiner.number([after - before for after in afters], sizes, f"the growth of {name}")
        return self._joiner.join(afters, sizes, name)


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


def _map(value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any] = lambda value: value) -> Any:
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
