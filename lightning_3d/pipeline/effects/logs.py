"""``self.log`` under microbatches: the calls of all microbatches joined to those that one step would have made."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.call_notes import CallNotes
from lightning_3d.pipeline.effects.effect import Effect, Place
from lightning_3d.pipeline.effects.join import Joiner, weighted_mean
from lightning_3d.pipeline.effects.metrics import ForwardValue, MetricReference, Metrics
from lightning_3d.torch_internals.pytree import tree_map, tree_map_only
from lightning_3d.trace.interception import Router

_SIGNATURE = inspect.signature(LightningModule.log)
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
    value: Any
    """A tensor or number, a dict of them, a ``MetricReference`` or a ``ForwardValue``."""
    arguments: Mapping[str, Any]
    """The other arguments, without ``batch_size``."""
    batch_size: int | None

    @classmethod
    def bound(cls, *args: Any, **kwargs: Any) -> LogCall:
        """The call ``self.log(*args, **kwargs)``."""
        arguments = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
        del arguments["self"]
        name, value, batch_size = arguments.pop("name"), arguments.pop("value"), arguments.pop("batch_size", None)
        return cls(name=name, value=value, arguments=arguments, batch_size=batch_size)


class Logs(Effect):
    """The calls of ``self.log``.

    Args:
        module: The user's module.
        metrics: Knows what is logged of metrics.
        router: Tells glue from blocks.
        joiner: Joins values over microbatches.
    """

    def __init__(self, module: LightningModule, metrics: Metrics, router: Router, joiner: Joiner) -> None:
        self._module, self._metrics, self._joiner = module, metrics, joiner
        self._notes: CallNotes[LogCall] = CallNotes(router)

    @property
    @override
    def acts_in_blocks(self) -> bool:
        return self._notes.in_blocks

    @override
    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        self._notes.clear()
        vars(self._module)["log"] = self._log
        try:
            yield
        finally:
            del vars(self._module)["log"]

    @override
    def microbatch(self, place: Place) -> AbstractContextManager[None]:
        return self._notes.microbatch(place)

    def _log(self, *args: Any, **kwargs: Any) -> None:
        call = LogCall.bound(*args, **kwargs)
        value = self._metrics.reference(call.value)
        if value is None and isinstance(call.value, nn.Module):
            raise StepError(
                f"self.log({call.name!r}, ...) got a {type(call.value).__name__} that is not a submodule of"
                f" {type(self._module).__name__}. Make it one (self.name = ...), so that all pipeline stages have it."
            )
        if value is None:  # a copy, since it may be changed in place later; on every stage, so that all call the same
            value = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, call.value)
        self._notes.add(replace(call, value=value))

    @override
    def collect(self, place: Place) -> list[Any]:
        return [call.value for call in self._notes.at(place)]

    @override
    def keep(self, place: Place, found: Sequence[Any]) -> None:
        values = tree_map_only(Tensor, Tensor.detach, list(found))
        calls = self._notes.at(place)
        self._notes.set(place, [replace(call, value=value) for call, value in zip(calls, values, strict=True)])

    @override
    def join(self, stage: int, sizes: Sequence[int], *, is_last: bool) -> list[LogCall]:
        calls = join_logs(self._notes.of_stage(stage, len(sizes)), sizes, self._joiner)
        return [replace(call, value=self._metrics.value_for_batch(call.value)) for call in calls]

    @override
    def study(self, stage: int, sizes: Sequence[int]) -> None:
        with suppress(StepError):
            join_logs(self._notes.of_stage(stage, len(sizes)), sizes, self._joiner)

    @override
    def apply(self, joined: Sequence[LogCall], *, is_own: bool) -> None:
        device = self._module.device
        for call in joined:
            value = self._metrics.resolved(call.value)
            value = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)
            self._module.log(call.name, value, **call.arguments, batch_size=call.batch_size)


def join_logs(per_microbatch: Sequence[Sequence[LogCall]], sizes: Sequence[int], joiner: Joiner) -> list[LogCall]:
    """The calls that one step on the whole batch would have made.

    Args:
        per_microbatch: The calls of each microbatch, in order.
        sizes: Samples in each microbatch.

    Raises:
        StepError: the microbatches logged different names, or a reduction is not known.
    """
    names = [[call.name for call in calls] for calls in per_microbatch]
    if any(other != names[0] for other in names):
        raise StepError(
            f"The microbatches of one batch logged different names: {names}. Log the same names in every step."
        )
    return [_join(calls, sizes, joiner) for calls in zip(*per_microbatch, strict=True)]


def _join(calls: Sequence[LogCall], sizes: Sequence[int], joiner: Joiner) -> LogCall:
    first = calls[0]
    counts, batch_size = _join_batch_sizes([call.batch_size for call in calls], sizes)
    if isinstance(first.value, (MetricReference, ForwardValue)):
        return replace(first, batch_size=batch_size)
    reduction = first.arguments.get("reduce_fx", "mean")
    if reduction not in _REDUCTIONS:
        raise StepError(
            f"self.log({first.name!r}, reduce_fx={reduction!r}): with a pipeline the values of microbatches are joined"
            " by 'mean', 'sum', 'max' or 'min'. Use one of them, or a torchmetrics.Metric."
        )
    known = _REDUCTIONS[reduction]

    def reduced(*values: Any) -> Any:
        if known == "sum":
            return torch.as_tensor(joiner.total(values, sizes, f"self.log({first.name!r}, reduce_fx='sum')"))
        return _reduce(values, counts, known)

    value = tree_map(reduced, *(call.value for call in calls))
    return replace(first, value=value, batch_size=batch_size)


def _join_batch_sizes(given: Sequence[int | None], sizes: Sequence[int]) -> tuple[Sequence[int], int | None]:
    """The weights of microbatches, and the batch size to log with.

    The same number for all, of which some microbatch's samples are no divisor, can't count samples (or tokens): it is a
    constant such as ``batch_size=1``.
    """
    counts = [size if count is None else count for count, size in zip(given, sizes, strict=True)]
    if given[0] is None:
        return sizes, None
    if len(set(counts)) == 1 and any(counts[0] % size for size in sizes):
        return sizes, counts[0]
    return counts, sum(counts)


def _reduce(values: Sequence[Any], counts: Sequence[int], reduction: str) -> Tensor:
    if reduction == "mean":
        return weighted_mean(values, counts)
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    return stacked.amax(0) if reduction == "max" else stacked.amin(0)
