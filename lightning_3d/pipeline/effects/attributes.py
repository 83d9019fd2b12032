"""What a step changes in the module's own attributes: lists that grow, counters, running values.

Glue runs once per microbatch, and on every stage up to where it leaves; in one process it runs once per batch. So every
microbatch starts with the attributes of before the step and leaves them so; what the last stage found changed is joined
over the microbatches and applied on all stages.

    before              after microbatch 0    after microbatch 1    applied
    outputs = [a]       [a, b0]               [a, b1]               outputs.append(join(b0, b1))
    total = 3.0         3.0 + x0              3.0 + x1              total = 3.0 + mean(x0, x1)
    num_samples = 8     8 + 4                 8 + 4                 num_samples = 8 + 8
    num_steps = 5       5 + 1                 5 + 1                 num_steps = 6

Left alone: modules inside of blocks, which run on one stage only; parameters; metrics (see ``metric_calls.py``); what
changes inside of objects other than lists, dicts, sets, deques and tensors.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.join import are_rows, join, weighted_mean
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.torch_internals.modules import buffers_of
from lightning_3d.torch_internals.tensors import version_of

_FRAMEWORK_NAMES = frozenset(vars(LightningModule())) | {"log"}
_DICTS = (dict, defaultdict, OrderedDict)
_LISTS = (list, deque)
_MISSING = object()


@dataclass(frozen=True, kw_only=True)
class Change:
    """One attribute, or an entry in it, that a step changed."""

    module: str
    """FQN."""
    path: tuple[Any, ...]
    """Name of the attribute, then keys and indices of containers in it."""
    how: Literal["set", "extend", "copy"]
    """``"extend"`` a list, deque or set; ``"copy"`` into the tensor that is there."""
    new: Any
    """The new value, or the new entries."""


class StepAttributes:
    """The attributes of the modules outside of blocks.

    Args:
        module: The whole model.
        blocks: Its blocks.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[nn.Module]) -> None:
        inside = {id(m) for block in blocks for m in block.modules()}
        inside |= {id(m) for metric in metrics_of(module).values() for m in metric.modules()}
        self._owners = {fqn: m for fqn, m in module.named_modules() if id(m) not in inside}
        self._originals: dict[str, dict[str, Any]] = {}
        self._before: dict[str, dict[str, Any]] = {}  # with containers copied
        self._containers: list[tuple[Any, Any]] = []  # container -> copy of its content
        self._tensors: dict[int, tuple[Tensor, int, Tensor]] = {}  # id -> tensor, its version, its data
        self._in_place: set[int] = set()  # ids of tensors that were changed in place
        self._afters: dict[int, dict[str, dict[str, Any]]] = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Remember the attributes as they are now."""
        self._containers, self._tensors, self._in_place, self._afters = [], {}, set(), {}
        self._originals = {fqn: _attributes(owner) for fqn, owner in self._owners.items()}
        self._before = {
            fqn: {name: self._remembered(value) for name, value in attributes.items()}
            for fqn, attributes in self._originals.items()
        }
        try:
            yield
        finally:
            self._originals, self._before, self._containers, self._tensors = {}, {}, [], {}

    def _remembered(self, value: Any) -> Any:
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            self._tensors[id(value)] = (value, version_of(value), value.detach().clone())
        if type(value) in (*_DICTS, *_LISTS, set):
            self._containers.append((value, copy.copy(value)))
        if type(value) in _DICTS:
            return {key: self._remembered(entry) for key, entry in value.items()}
        if type(value) in _LISTS:  # tensors in lists are results of earlier steps, which are not changed in place
            return [entry if isinstance(entry, Tensor) else self._remembered(entry) for entry in value]
        return set(value) if type(value) is set else value

    @contextmanager
    def microbatch(self) -> Iterator[None]:
        """Put back what changes inside."""
        try:
            yield
        finally:
            for fqn, owner in self._owners.items():
                for name, value in _attributes(owner).items():
                    if name not in self._originals[fqn]:
                        _holder(owner, name).pop(name)
                    elif self._originals[fqn][name] is not value:
                        _holder(owner, name)[name] = self._originals[fqn][name]
                for name in self._originals[fqn].keys() - _attributes(owner).keys():
                    _holder(owner, name)[name] = self._originals[fqn][name]
            for container, content in self._containers:
                _refill(container, content)
            for i, (tensor, version, data) in self._tensors.items():
                if version_of(tensor) != version:
                    tensor.detach().copy_(data)
                    self._tensors[i] = (tensor, version_of(tensor), data)

    def tensors(self) -> list[Tensor]:
        """The tensors in the attributes as they are now, in a fixed order."""
        found: list[Tensor] = []
        self._mapped(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
        return found

    def keep(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Keep the attributes as microbatch ``index`` left them.

        Args:
            tensors: What ``tensors`` gave, with the data behind ghosts filled in.
        """
        following = iter(tensors)

        def settled(present: Tensor) -> Tensor:
            tensor = next(following)
            if id(present) not in self._tensors:
                return tensor if tensor is present and not tensor.requires_grad else tensor.detach()
            if tensor is present and version_of(tensor) == self._tensors[id(present)][1]:
                return tensor
            self._in_place.add(id(present))
            return tensor.detach().clone()

        self._afters[index] = self._mapped(settled)

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> dict[str, dict[str, Any]]:
        return {fqn: {n: _map(v, change) for n, v in _attributes(m).items()} for fqn, m in self._owners.items()}

    def joined(self, sizes: Sequence[int]) -> list[Change]:
        """The changes that one step on the whole batch would have made.

        Args:
            sizes: Samples in each microbatch.

        Raises:
            StepError: the microbatches left values that can't be joined.
        """
        changes: list[Change] = []
        afters = [self._afters[index] for index in range(len(sizes))]
        for fqn, before in self._before.items():
            for name in dict.fromkeys(name for after in afters for name in after[fqn]):
                values = [after[fqn].get(name, _MISSING) for after in afters]
                changes += self._changes(fqn, (name,), before.get(name, _MISSING), values, sizes)
        return changes

    def _changes(
        self, fqn: str, path: tuple[Any, ...], before: Any, afters: Sequence[Any], sizes: Sequence[int]
    ) -> list[Change]:
        if all(_is_same(before, after) for after in afters):
            return []
        name = ".".join(["self", *filter(None, [fqn]), str(path[0])]) + "".join(f"[{key!r}]" for key in path[1:])
        if type(before) in _DICTS and all(type(a) in _DICTS and a.keys() >= before.keys() for a in afters):
            keys = dict.fromkeys(key for after in afters for key in after)
            pairs = [(key, before.get(key, _MISSING), [after.get(key, _MISSING) for after in afters]) for key in keys]
            return [c for key, old, new in pairs for c in self._changes(fqn, (*path, key), old, new, sizes)]
        if isinstance(before, list) and all(isinstance(after, list) and _begins(after, before) for after in afters):
            inner = [(i, entry, [after[i] for after in afters]) for i, entry in enumerate(before)]
            found = [c for i, old, new in inner for c in self._changes(fqn, (*path, i), old, new, sizes)]
            added = [after[len(before) :] for after in afters]
            if any(added):
                found.append(Change(module=fqn, path=path, how="extend", new=_join_added(added, sizes, name)))
            return found
        if isinstance(before, set) and all(isinstance(after, set) and after >= before for after in afters):
            return [Change(module=fqn, path=path, how="extend", new=set().union(*afters) - before)]
        if any(after is _MISSING for after in afters):
            raise StepError(f"{name} is set for some microbatches of a batch only. Set it in every step.")
        how: Literal["set", "copy"] = "copy" if id(before) in self._in_place else "set"
        return [Change(module=fqn, path=path, how=how, new=_join_value(before, afters, sizes, name))]

    def apply(self, changes: Sequence[Change], device: torch.device) -> None:
        """Make the changes here."""
        for change in changes:
            new = _map(change.new, lambda tensor: tensor.to(device))
            holder: Any = _holder(self._owners[change.module], change.path[0])
            for key in change.path[:-1]:
                holder = holder[key]
            present: Any = holder.get(change.path[-1]) if isinstance(holder, dict) else holder[change.path[-1]]
            if change.how == "set" and type(present) in (deque, defaultdict, OrderedDict):
                _refill(present, new)
            elif change.how == "set":
                holder[change.path[-1]] = new
            elif change.how == "copy":
                present.detach().copy_(new)
            elif isinstance(new, set):
                present.update(new)
            else:
                present.extend(new)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Buffers and the author's own plain attributes."""
    own = {name: value for name, value in vars(module).items() if name not in _FRAMEWORK_NAMES}
    return own | {name: buffer for name, buffer in buffers_of(module).items() if buffer is not None}


def _holder(module: nn.Module, name: str) -> dict[str, Any]:
    """The dict that the attribute is in."""
    return buffers_of(module) if name in buffers_of(module) else vars(module)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, _LISTS) else container.update(content)


def _map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy with other tensors; deques become lists, all dicts plain ones."""
    if isinstance(value, Tensor):
        return value if isinstance(value, nn.Parameter) else change(value)
    if type(value) in _DICTS:
        return {key: _map(entry, change) for key, entry in value.items()}
    if type(value) in _LISTS:
        return [_map(entry, change) for entry in value]
    if type(value) is tuple:
        return tuple(_map(entry, change) for entry in value)
    return set(value) if type(value) is set else value


def _is_same(before: Any, after: Any) -> bool:
    if before is after:
        return True
    if isinstance(before, Tensor) or type(before) is not type(after):
        return False
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(_is_same(before[key], after[key]) for key in before)
    if isinstance(before, (list, tuple)):
        return len(before) == len(after) and all(map(_is_same, before, after))
    return type(before) in (int, float, bool, str, bytes, set) and bool(before == after)


def _begins(after: list[Any], before: list[Any]) -> bool:
    """Whether the leaves that were in a list are still there."""
    if len(after) < len(before):
        return False
    return all(
        _is_same(old, new) or (isinstance(old, (dict, list, set)) and type(old) is type(new))
        for old, new in zip(before, after[: len(before)], strict=True)
    )


def _join_added(added: Sequence[list[Any]], sizes: Sequence[int], name: str) -> list[Any]:
    """New entries: either one for each sample, or parts that each stand for the batch."""
    if len(added) > 1 and max(sizes) > 1 and are_rows(added, sizes):
        return [entry for entries in added for entry in entries]
    if len({len(entries) for entries in added}) > 1:
        raise StepError(
            f"The microbatches of a batch added {[len(entries) for entries in added]} entries to {name}, which are"
            " neither as many for each nor one for each sample. Add as many in every step."
        )
    return [join(entries, sizes, f"an entry added to {name}") for entries in zip(*added, strict=True)]


def _join_value(before: Any, afters: Sequence[Any], sizes: Sequence[int], name: str) -> Any:
    if len(afters) == 1:
        return afters[0]
    if isinstance(before, Tensor) and all(isinstance(a, Tensor) and a.shape == before.shape for a in afters):
        if before.is_floating_point() or before.is_complex():
            return weighted_mean(afters, sizes)
        if before.dtype != torch.bool and before.ndim == 0:
            start = int(before)
            return torch.full_like(before, start + _joined_step([int(a) - start for a in afters], sizes, name))
        if before.dtype != torch.bool:
            return before + torch.stack([after - before for after in afters]).sum(0)
    if type(before) is int and all(type(after) is int for after in afters):
        return before + _joined_step([after - before for after in afters], sizes, name)
    return join(afters, sizes, name)


def _joined_step(steps: Sequence[int], sizes: Sequence[int], name: str) -> int:
    """How far a counter goes for the batch, from how far it goes for microbatches."""
    is_constant = len(set(steps)) == 1
    if is_constant and steps[0] == 1 and max(sizes) == 1:
        raise StepError(
            f"{name} grew by 1 in microbatches of one sample, so it may count steps or samples, and which is"
            " unknown. Count in on_train_batch_end, on_validation_batch_end or the like, or lower"
            " pipeline.num_microbatches."
        )
    counts_samples = all(step > 0 and step % size == 0 for step, size in zip(steps, sizes, strict=True))
    return sum(steps) if counts_samples or not is_constant else steps[0]
