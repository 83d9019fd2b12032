"""Metrics of torchmetrics under microbatches: one update per batch, with the arguments of all microbatches joined.

    microbatch 0   self.accuracy(logits_0, y_0)   noted; returns the value of this microbatch; no state changes
    microbatch 1   self.accuracy(logits_1, y_1)   the same
    after both     self.accuracy(cat(logits), cat(y))

So a metric that counts its updates (MeanMetric of a loss, SumMetric of a number) gets those of one process, and so does
the value that ``self.accuracy(...)`` returns for the batch if it is logged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import Snapshot
from lightning_3d.pipeline.effects.call_notes import CallNotes
from lightning_3d.pipeline.effects.effect import Effect, Place
from lightning_3d.pipeline.effects.join import Joiner
from lightning_3d.pipeline.effects.metric_changes import MetricChanges, apply_changes
from lightning_3d.torch_internals.lightning_helpers import start_anew
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.trace.interception import Router

_METHODS = ("update", "forward", "reset", "compute")


@dataclass(frozen=True, kw_only=True)
class MetricCall:
    """A call of ``update``, ``forward`` or ``reset``."""

    fqn: str
    method: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


def metrics_of(module: nn.Module) -> dict[str, nn.Module]:
    """FQN -> metric or collection of metrics."""
    return {fqn: m for fqn, m in module.named_modules() if isinstance(m, (Metric, MetricCollection))}


@dataclass(frozen=True, kw_only=True)
class MetricReference:
    """Stands for a metric of the module in what is logged."""

    fqn: str


@dataclass(frozen=True, kw_only=True)
class ForwardValue:
    """Stands for what a metric's ``forward`` returned for the batch in what is logged."""

    call: int
    """Which of the step's metric calls it was."""
    key: str | None
    """Which value, if it was a collection."""


class Metrics(Effect):
    """The updates of metrics.

    Args:
        module: The user's module.
        router: Tells glue from blocks.
        joiner: Joins values over microbatches.
    """

    def __init__(self, module: LightningModule, router: Router, joiner: Joiner) -> None:
        self._module, self._metrics, self._joiner = module, metrics_of(module), joiner
        self._fqns = {id(metric): fqn for fqn, metric in self._metrics.items()}
        self._notes: CallNotes[MetricCall] = CallNotes(router)
        self._is_inside = False  # of a metric's own code, which may call other metrics
        self._values: dict[int, tuple[Tensor, ForwardValue]] = {}  # id of what a metric returned -> it, its reference
        self._answers: list[Any] = []  # to the calls for the whole batch, of the stage joined last

    @property
    @override
    def acts_in_blocks(self) -> bool:
        return self._notes.in_blocks

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._notes.clear()
        before = [
            (metric, {name: vars(metric)[name] for name in _METHODS if name in vars(metric)})
            for metric in self._metrics.values()
        ]
        for fqn, metric in self._metrics.items():
            calls = {name: partial(self._on_call, fqn, metric, name, getattr(metric, name)) for name in _METHODS}
            vars(metric).update(calls)
        try:
            yield
        finally:
            for metric, own in before:
                for name in _METHODS:
                    del vars(metric)[name]
                vars(metric).update(own)

    @override
    @contextmanager
    def microbatch(self, place: Place) -> Iterator[None]:
        with self._notes.microbatch(place):
            try:
                yield
            finally:
                self._values = {}

    def _on_call(
        self, fqn: str, metric: nn.Module, name: str, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if self._is_inside:
            return method(*args, **kwargs)
        if name == "compute":
            raise StepError(
                f"{fqn}.compute() was called in a step, but with a pipeline metrics are updated after all microbatches"
                f" of a batch have run. Log the metric itself (self.log(name, self.{fqn})), or call compute() in"
                " on_train_epoch_end, on_validation_epoch_end or another hook."
            )
        number = self._notes.add(MetricCall(fqn=fqn, method=name, arguments=(args, kwargs)))
        if name != "forward":
            return None
        self._is_inside = True
        try:
            with _scratch_state(metric):
                value = method(*args, **kwargs)
        finally:
            self._is_inside = False
        for key, tensor in value.items() if isinstance(value, Mapping) else [(None, value)]:
            if isinstance(tensor, Tensor):  # on every stage, so that all log alike
                self._values[id(tensor)] = (tensor, ForwardValue(call=number, key=key))
        return value

    @override
    def collect(self, place: Place) -> list[Any]:
        return [call.arguments for call in self._notes.at(place)]

    @override
    def keep(self, place: Place, found: Sequence[Any]) -> None:
        arguments = tree_map_only(Tensor, Tensor.detach, list(found))
        calls = self._notes.at(place)
        self._notes.set(place, [replace(call, arguments=own) for call, own in zip(calls, arguments, strict=True)])

    @override
    def join(self, stage: int, sizes: Sequence[int], *, is_last: bool) -> dict[str, dict[str, Any]]:
        """FQN of a metric that was updated, as it was on this rank -> its changes."""
        calls = join_calls(self._notes.of_stage(stage, len(sizes)), sizes, self._joiner)
        changes = MetricChanges(self._metrics if calls else {})
        self._answers = make_calls(calls, self._metrics)
        return changes.found([call.fqn for call in calls], was_reset=any(call.method == "reset" for call in calls))

    @override
    def study(self, stage: int, sizes: Sequence[int]) -> None:
        with suppress(StepError):
            join_calls(self._notes.of_stage(stage, len(sizes)), sizes, self._joiner)

    @override
    def apply(self, joined: Mapping[str, Mapping[str, Any]], *, is_own: bool) -> None:
        device = self._module.device
        if not is_own:
            apply_changes(joined, self._metrics, lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf)

    # ---- for logs

    def reference(self, value: Any) -> MetricReference | ForwardValue | None:
        """A stand-in for a metric, or for what its ``forward`` just returned; None for other values."""
        if id(value) in self._values:
            return self._values[id(value)][1]
        return MetricReference(fqn=self._fqns[id(value)]) if id(value) in self._fqns else None

    def value_for_batch(self, value: Any) -> Any:
        """A metric's answer for the whole batch, on the stage joined last, in place of a ``ForwardValue``."""
        if not isinstance(value, ForwardValue):
            return value
        answer = self._answers[value.call]
        return answer if value.key is None else answer[value.key]

    def resolved(self, value: Any) -> Any:
        """The metric in place of a ``MetricReference``."""
        return self._metrics[value.fqn] if isinstance(value, MetricReference) else value


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


def join_calls(
    per_microbatch: Sequence[Sequence[MetricCall]], sizes: Sequence[int], joiner: Joiner
) -> list[MetricCall]:
    """The calls that one step on the whole batch would have made.

    Raises:
        StepError: the microbatches made different calls, or their arguments can't be joined.
    """
    names = [[f"{call.fqn}.{call.method}" for call in calls] for calls in per_microbatch]
    if any(other != names[0] for other in names):
        raise StepError(
            f"The microbatches of one batch made different calls of metrics: {names}. Make the same"
            " calls in every step."
        )
    return [_joined_call(calls, sizes, joiner) for calls in zip(*per_microbatch, strict=True)]


def _joined_call(calls: Sequence[MetricCall], sizes: Sequence[int], joiner: Joiner) -> MetricCall:
    first, where = calls[0], f"an argument of {calls[0].fqn}.{calls[0].method}"

    def join(values: Sequence[Any], name: str) -> Any:
        if all(isinstance(value, Tensor) and value.ndim > 0 for value in values):
            return torch.cat(list(values))  # rows, be it of samples, tokens or pixels
        return joiner.join(values, sizes, name)

    columns = enumerate(zip(*(call.arguments[0] for call in calls), strict=True))
    args = tuple(join(values, f"{where}, number {i}") for i, values in columns)
    kwargs = {n: join([call.arguments[1][n] for call in calls], f"{where}, {n}") for n in first.arguments[1]}
    return replace(first, arguments=(args, kwargs))


def make_calls(calls: Sequence[MetricCall], metrics: Mapping[str, nn.Module]) -> list[Any]:
    """Make the calls and return what they returned."""
    answers = []
    for call in calls:
        args, kwargs = call.arguments
        metric = metrics[call.fqn]
        method = metric if call.method == "forward" else getattr(metric, call.method)
        answers.append(method(*args, **kwargs))
    return answers
