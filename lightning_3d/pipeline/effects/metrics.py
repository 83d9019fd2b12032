"""Metrics of torchmetrics in a step: its calls of them are made after it, once for the batch, as in one process.

    self.accuracy(logits, y)   in the step: noted; returns the value of this batch; no state changes
    after the step             self.accuracy(logits, y), on the rank of the last stage, with data in place of ghosts

Ranks that did not update a metric are sent what it changed in itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import Snapshot
from lightning_3d.pipeline.effects.effect import NotedCalls
from lightning_3d.pipeline.effects.merge import unseen
from lightning_3d.torch_internals.lightning_helpers import FIXED_NAMES, start_anew
from lightning_3d.torch_internals.modules import TORCH_ATTRIBUTES
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.interception import Router

_METHODS = ("update", "forward", "reset", "compute")


class MetricCall(NamedTuple):
    """A call of ``update``, ``forward`` or ``reset``."""

    fqn: str
    """Name of the metric."""
    method: str
    args: tuple[object, ...]
    kwargs: dict[str, object]


def metrics_of(module: nn.Module) -> dict[str, nn.Module]:
    """FQN -> metric or collection of metrics."""
    return {fqn: m for fqn, m in module.named_modules() if isinstance(m, (Metric, MetricCollection))}


class Metrics(NotedCalls[MetricCall]):
    """The updates of metrics."""

    kind = "metrics"

    def __init__(self, module: LightningModule, router: Router) -> None:
        super().__init__(router)
        self._module, self._metrics = module, metrics_of(module)
        self._is_inside = False  # of a metric's own code, which may call other metrics
        self._before: Snapshot | None = None  # of the metrics that `join` updated

    @property
    @override
    def has_side_effects(self) -> bool:
        return bool(self._present)

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        with ExitStack() as stack:
            for fqn, metric in self._metrics.items():
                calls = {name: partial(self._on_call, fqn, metric, name, getattr(metric, name)) for name in _METHODS}
                stack.enter_context(replaced("metrics", metric, calls))
            yield

    def _on_call(
        self, fqn: str, metric: nn.Module, name: str, method: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        if self._is_inside:
            return method(*args, **kwargs)
        if name == "compute":
            raise StepError(
                f"{fqn}.compute() was called in a step, but with a pipeline metrics are updated after the step."
                f" Log the metric itself (self.log(name, self.{fqn})), or call compute() in"
                " on_train_epoch_end, on_validation_epoch_end or another hook."
            )
        self._note(f"{fqn}.{name}", MetricCall(fqn, name, args, kwargs))
        if name != "forward":
            return None
        self._is_inside = True
        try:
            with _scratch_state(metric):
                return method(*args, **kwargs)
        finally:
            self._is_inside = False

    @override
    def join(
        self, stage: int, found: Sequence[Sequence[MetricCall]], sizes: Sequence[int]
    ) -> dict[str, dict[str, object]]:
        """FQN of a metric that was updated, as it was on this rank -> its changes."""
        calls = [call for of_microbatch in found for call in of_microbatch]
        if len(found) > 1 and calls:
            raise unseen(f"a call of {calls[0].fqn}.{calls[0].method}")
        touched = {id(inner) for call in calls for inner in self._metrics[call.fqn].modules()}
        updated = {fqn: metric for fqn, metric in self._metrics.items() if id(metric) in touched}
        before = {fqn: _state(metric) for fqn, metric in updated.items()}
        self._before = Snapshot(inner for metric in updated.values() for inner in metric.modules()) if calls else None
        self._is_inside = True
        try:
            for call in calls:
                metric = self._metrics[call.fqn]
                (metric if call.method == "forward" else getattr(metric, call.method))(*call.args, **call.kwargs)
        finally:
            self._is_inside = False
        return {fqn: _changes(before[fqn], _state(metric)) for fqn, metric in updated.items()}

    @override
    def apply(self, merged: Mapping[str, Mapping[str, Any]], *, is_own: bool) -> None:
        device = self._module.device
        for fqn, attributes in () if is_own else merged.items():
            own = vars(self._metrics[fqn])
            for name, value in attributes.items():
                is_appended = isinstance(value, _Appended)
                moved = tree_map_only(Tensor, lambda leaf: leaf.to(device), value.entries if is_appended else value)
                own[name] = [*own[name], *moved] if is_appended else moved
        self._before = None

    @override
    def undo(self) -> None:
        if self._before is not None:
            self._before.restore()
        self._before = None


@contextmanager
def _scratch_state(metric: nn.Module) -> Iterator[None]:
    """Run a metric on states of its own, and forget them."""
    snapshot = Snapshot(metric.modules(), with_data=False)
    for inner in metric.modules():
        if isinstance(inner, Metric):
            start_anew(inner)
    try:
        yield
    finally:
        snapshot.restore()


@dataclass(frozen=True, kw_only=True)
class _Appended:
    """New entries of a list state."""

    entries: list[object]


def _state(metric: nn.Module) -> dict[str, object]:
    """Attributes that updates may change, containers copied."""
    fixed = TORCH_ATTRIBUTES | FIXED_NAMES
    return {
        name: value.copy() if type(value) in (list, dict, set) else value
        for name, value in vars(metric).items()
        if name not in fixed and not callable(value)
    }


def _changes(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """The attributes of a metric that may have changed; of lists that only grew, the new entries."""
    changed: dict[str, object] = {}
    for name, value in after.items():
        old: object = before.get(name)
        if type(old) is type(value) is list and len(value) >= len(old) and all(map(is_, old, value)):
            changed[name] = _Appended(entries=value[len(old) :])
        elif isinstance(value, (Tensor, list, dict)) or name not in before or old is not value:
            changed[name] = value
    return changed
