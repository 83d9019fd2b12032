"""``self.log`` in a step: made after it, on all ranks; calls of microbatches joined to those of one step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.distributed.replica_world import is_of_all
from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.effect import NotedCalls
from lightning_3d.pipeline.effects.merge import Merger, unseen
from lightning_3d.pipeline.effects.metrics import metrics_of
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import tree_map, tree_map_only
from lightning_3d.trace.interception import Router

_SIGNATURE = inspect.signature(LightningModule.log)
_MEANS = ("mean", "avg", torch.mean)


@dataclass(frozen=True)
class MetricReference:
    """Stands for a metric of the module in what is logged."""

    fqn: str


class LogCall(NamedTuple):
    """A call of ``self.log``."""

    name: str
    given: object
    """A tensor or number, a dict of them, or a ``MetricReference``."""
    arguments: Mapping[str, Any]
    """The other arguments, without ``batch_size``."""
    batch_size: int | None

    @classmethod
    def bound(cls, replicas: Callable[[], dist.ProcessGroup], *args: object, **kwargs: object) -> LogCall:
        """The call ``self.log(*args, **kwargs)``.

        Args:
            replicas: Gives the group of the replicas, which is that of all ranks to user code.
        """
        arguments = dict(_SIGNATURE.bind(None, *args, **kwargs).arguments)
        del arguments["self"]
        if arguments.get("sync_dist_group") is not None:
            _check_group(arguments.pop("sync_dist_group"), replicas(), arguments["name"])
        name, given, batch_size = arguments.pop("name"), arguments.pop("value"), arguments.pop("batch_size", None)
        return cls(name=name, given=given, arguments=arguments, batch_size=batch_size)


def _check_group(group: object, replicas: dist.ProcessGroup, name: str) -> None:
    """Raise for any group but that of all ranks, which stands for the replicas in every layout."""
    if not is_of_all(group, replicas):
        raise StepError(
            f"self.log({name!r}, sync_dist_group=...): with a pipeline the stages log alike, each over its replicas,"
            " and know no other group. Leave sync_dist_group out."
        )


class Logs(NotedCalls[LogCall]):
    """The calls of ``self.log``."""

    kind = "self.log"

    def __init__(self, module: LightningModule, router: Router, merger: Merger) -> None:
        super().__init__(router)
        self._module, self._merger = module, merger
        self._metrics = {id(metric): fqn for fqn, metric in metrics_of(module).items()}

    @property
    @override
    def has_side_effects(self) -> bool:
        return any(call.arguments.get("reduce_fx", "mean") not in _MEANS for call in self._present)

    @override
    def begin(self, number: int) -> AbstractContextManager[None]:
        return replaced("logs", self._module, {"log": self._log})

    def _replicas(self) -> dist.ProcessGroup:
        strategy: Any = self._module.trainer.strategy
        group: dist.ProcessGroup = strategy.mesh.group("samples")
        return group

    def _log(self, *args: object, **kwargs: object) -> None:
        call = LogCall.bound(self._replicas, *args, **kwargs)
        given = call.given
        if id(given) in self._metrics:
            value: object = MetricReference(self._metrics[id(given)])
        elif isinstance(given, nn.Module):
            raise StepError(
                f"self.log({call.name!r}, ...) got a {type(given).__name__} that is not a submodule of"
                f" {type(self._module).__name__}. Make it one (self.name = ...), so that all pipeline stages have it."
            )
        else:  # a copy, since it may be changed in place later; on every stage, so that all call the same
            value = tree_map_only(Tensor, lambda leaf: leaf.detach().clone(), given)
        self._note(call.name, call._replace(given=value))

    @override
    def join(self, stage: int, found: Sequence[Sequence[LogCall]], sizes: Sequence[int]) -> list[LogCall]:
        names = [[call.name for call in calls] for calls in found]
        if any(other != names[0] for other in names):
            raise unseen(f"a call of self.log, of {names} in the microbatches,")
        return [self._join(calls, sizes) for calls in zip(*found, strict=True)]

    @override
    def apply(self, merged: Sequence[LogCall], *, is_own: bool) -> None:
        device = self._module.device
        for call in merged:
            value = tree_map_only(Tensor, lambda leaf: leaf.to(device), call.given)
            if isinstance(value, MetricReference):
                value = self._module.get_submodule(value.fqn)
            self._module.log(call.name, value, **call.arguments, batch_size=call.batch_size)

    def _join(self, calls: Sequence[LogCall], sizes: Sequence[int]) -> LogCall:
        """Join one call of every microbatch."""
        first = calls[0]
        if len(calls) == 1:
            return first
        name, batch_size = first.name, first.batch_size
        if batch_size is not None:
            exact = [torch.as_tensor(call.batch_size, dtype=torch.float64) for call in calls]
            batch_size = round(self._merger.number(exact, sizes, f"batch_size of self.log({name!r})", "sum").item())
        if isinstance(first.given, MetricReference):
            return first._replace(batch_size=batch_size)

        def merged(*values: Tensor | float) -> Tensor:
            return self._merger.number(values, sizes, f"self.log({name!r})")

        return first._replace(given=tree_map(merged, *(call.given for call in calls)), batch_size=batch_size)
