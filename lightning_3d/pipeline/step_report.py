"""What the last stage learned in a step, for the other stages: the loss, logged values, metric states.

Only the last stage runs the step to its end. It records every ``self.log`` per microbatch, joins the microbatches to
the value that the whole batch would have logged, and sends the result to the other stages, where it is replayed: so
callbacks, the progress bar and ``ModelCheckpoint(monitor=...)`` see the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_3d.errors import StepError

_Value = Any
_REDUCTIONS: Mapping[Any, str] = {
    "mean": "mean",
    "avg": "mean",
    torch.mean: "mean",
    "sum": "sum",
    torch.sum: "sum",
    sum: "sum",
    "max": "max",
    torch.max: "max",
    max: "max",
    "min": "min",
    torch.min: "min",
    min: "min",
}


@dataclass(frozen=True, kw_only=True)
class LogCall:
    """One call of ``self.log``."""

    name: str
    value: _Value
    """A detached tensor or number, a dict of them, or a ``MetricReference``."""
    arguments: Mapping[str, Any]
    """The other keyword arguments, without ``batch_size``."""
    batch_size: int | None


@dataclass(frozen=True, kw_only=True)
class MetricReference:
    """Stands for a metric of the module in a report."""

    fqn: str


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of a step on the whole batch."""

    output: Any
    """What the step returned: the loss (detached) or a dict with it, joined over microbatches."""
    logged: Sequence[LogCall]
    metrics: Mapping[str, Mapping[str, Any]]
    """FQN of a metric that was updated -> its new state."""


class LogRecorder:
    """Takes the place of ``self.log`` while microbatches run."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._fqns = {
            id(m): fqn for fqn, m in module.named_modules() if isinstance(m, torchmetrics.Metric)
        }  # hash varies
        self._calls: dict[int, list[LogCall]] = {}
        self._microbatch = 0

    @contextmanager
    def microbatch(self, index: int) -> Iterator[None]:
        """Record the calls made inside as those of this microbatch."""
        self._microbatch = index
        self._calls[index] = []
        self._module.__dict__["log"] = self
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Drop the calls made inside: the step of a stage that does not run to the end."""
        self._module.__dict__["log"] = lambda *args, **kwargs: None
        try:
            yield
        finally:
            del self._module.__dict__["log"]

    def __call__(self, name: str, value: _Value, *args: Any, batch_size: int | None = None, **kwargs: Any) -> None:
        names = ("prog_bar", "logger", "on_step", "on_epoch", "reduce_fx")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if isinstance(value, torchmetrics.Metric):
            value = MetricReference(fqn=self._fqns[id(value)])
        else:
            value = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
        self._calls[self._microbatch].append(
            LogCall(name=name, value=value, arguments=arguments, batch_size=batch_size)
        )

    def values(self, index: int) -> list[_Value]:
        """The values logged by one microbatch, in order."""
        return [call.value for call in self._calls.get(index, [])]

    def joined(self, sizes: Sequence[int]) -> list[LogCall]:
        """The calls that one step on the whole batch would have made.

        Args:
            sizes: Samples in each microbatch.
        """
        per_microbatch = [self._calls[index] for index in range(len(sizes))]
        if len({tuple(call.name for call in calls) for calls in per_microbatch}) > 1:
            raise StepError(
                "The microbatches of one batch logged different names:"
                f" {[[call.name for call in calls] for calls in per_microbatch]}. Log the same names in every step."
            )
        return [_join(calls, sizes) for calls in zip(*per_microbatch, strict=True)]


def _join(calls: Sequence[LogCall], sizes: Sequence[int]) -> LogCall:
    first = calls[0]
    counts = [size if call.batch_size is None else call.batch_size for call, size in zip(calls, sizes, strict=True)]
    batch_size = None if first.batch_size is None else sum(counts)
    if isinstance(first.value, MetricReference):
        return LogCall(name=first.name, value=first.value, arguments=first.arguments, batch_size=batch_size)
    reduction = first.arguments.get("reduce_fx", "mean")
    if reduction not in _REDUCTIONS:
        raise StepError(
            f"self.log({first.name!r}, reduce_fx={reduction!r}): with a pipeline the values of microbatches are joined"
            " by 'mean', 'sum', 'max' or 'min'. Use one of them, or a torchmetrics.Metric."
        )
    join = _joiner(_REDUCTIONS[reduction], counts)
    value = tree_map(lambda *values: join(values), *(call.value for call in calls))
    return LogCall(name=first.name, value=value, arguments=first.arguments, batch_size=batch_size)


def _joiner(reduction: str, counts: Sequence[int]) -> Callable[[Sequence[Any]], Tensor]:
    def join(values: Sequence[Any]) -> Tensor:
        stacked = torch.stack([torch.as_tensor(value) for value in values])
        if reduction == "mean":
            weights = torch.tensor(counts, device=stacked.device, dtype=torch.float64) / sum(counts)
            dtype = stacked.dtype if stacked.is_floating_point() else torch.get_default_dtype()
            mean: Tensor = torch.tensordot(weights, stacked.double(), dims=1)
            return mean.to(dtype)
        if reduction == "sum":
            return stacked.sum(0)
        return stacked.amax(0) if reduction == "max" else stacked.amin(0)

    return join


def metric_updates(module: LightningModule) -> dict[str, int]:
    """How often each metric of the module was updated, to tell later which were."""
    return {fqn: m._update_count for fqn, m in module.named_modules() if isinstance(m, torchmetrics.Metric)}


def metric_states(module: LightningModule, before: Mapping[str, int]) -> dict[str, dict[str, Any]]:
    """The states of the metrics that were updated since ``before``."""
    states = {}
    for fqn, metric in module.named_modules():
        if isinstance(metric, torchmetrics.Metric) and metric._update_count != before[fqn]:
            states[fqn] = {"_update_count": metric._update_count, **{n: getattr(metric, n) for n in metric._defaults}}
    return states


def share(report: StepReport | None, group: dist.ProcessGroup, source: int, device: torch.device) -> StepReport:
    """Send the last stage's report to all stages.

    Args:
        report: The report on the last stage, None elsewhere.
        source: Global rank of the last stage.
    """
    objects = [report]
    dist.broadcast_object_list(objects, src=source, group=group, device=device)
    assert objects[0] is not None
    return objects[0]


def replay(report: StepReport, module: LightningModule, *, is_source: bool) -> None:
    """Make the logging calls and the metric updates of the last stage here."""
    metrics = {fqn: m for fqn, m in module.named_modules() if isinstance(m, torchmetrics.Metric)}
    if not is_source:
        for fqn, state in report.metrics.items():
            metrics[fqn]._computed = None
            for name, value in state.items():
                setattr(metrics[fqn], name, tree_map(lambda leaf: _here(leaf, module.device), value))
    for call in report.logged:
        value = metrics[call.value.fqn] if isinstance(call.value, MetricReference) else call.value
        value = value if isinstance(value, torchmetrics.Metric) else tree_map(lambda v: _here(v, module.device), value)
        module.log(call.name, value, **call.arguments, batch_size=call.batch_size)


def _here(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf
