"""Notes what the microbatches of a step log and which metrics they update, instead of doing it at once.

A call made in a block is noted by the stage that runs the block; one made in glue, which runs on several stages, by the
last stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.pipeline.effects.logs import ForwardValue, LogCall, MetricReference, join_logs
from lightning_3d.pipeline.effects.metrics import MetricCall, join_calls, metric_calls_seen
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.trace.interception import Router


class _Notes:
    """What one microbatch did on one stage."""

    def __init__(self, *, keeps_glue: bool) -> None:
        self.keeps_glue = keeps_glue
        self.logs: list[LogCall] = []
        self.calls: list[MetricCall] = []
        self.values: dict[int, tuple[Tensor, ForwardValue]] = {}  # id of what a metric returned -> it, its name


class StepRecorder:
    """Takes the place of ``self.log`` and of the metrics' methods while microbatches run.

    Args:
        module: The user's module.
        metrics: Its metrics by FQN.
        router: Tells glue from blocks.
    """

    def __init__(self, module: LightningModule, metrics: Mapping[str, nn.Module], router: Router) -> None:
        self._module, self._metrics, self._router = module, metrics, router
        self._fqns = {id(metric): fqn for fqn, metric in metrics.items()}
        self._notes: dict[tuple[int, int], _Notes] = {}
        self._present: _Notes | None = None
        self.was_called_in_blocks = False
        """Whether a block logged or updated a metric."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """See the calls made inside. Those outside of a ``microbatch``, in recomputed forwards, are dropped."""
        vars(self._module)["log"] = self._log
        try:
            with metric_calls_seen(self._metrics, self._note, self._value_of):
                yield
        finally:
            del vars(self._module)["log"]

    @contextmanager
    def microbatch(self, stage: int, index: int, *, keeps_glue: bool) -> Iterator[None]:
        """Note the calls made inside as those of this microbatch on this stage."""
        self._present = self._notes[stage, index] = _Notes(keeps_glue=keeps_glue)
        try:
            yield
        finally:
            self._present = None

    def _log(self, *args: Any, **kwargs: Any) -> None:
        call = LogCall.bound(*args, **kwargs)
        if self._present is not None and isinstance(call.value, Tensor) and id(call.value) in self._present.values:
            call = replace(call, value=self._present.values[id(call.value)][1])
        elif id(call.value) in self._fqns:
            call = replace(call, value=MetricReference(fqn=self._fqns[id(call.value)]))
        elif isinstance(call.value, nn.Module):
            raise StepError(
                f"self.log({call.name!r}, ...) got a {type(call.value).__name__} that is not a submodule of"
                f" {type(self._module).__name__}. Make it one (self.name = ...), so that all pipeline stages have it."
            )
        else:  # a copy, since it may be changed in place later; on every stage, so that all make the same calls
            value = tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, call.value)
            call = replace(call, value=value)
        if self._is_noted():
            assert self._present is not None
            self._present.logs.append(call)

    def _note(self, call: MetricCall) -> None:
        if self._is_noted():
            assert self._present is not None
            self._present.calls.append(call)

    def _is_noted(self) -> bool:
        if self._present is None:
            return False
        is_in_block = self._router.step is None
        self.was_called_in_blocks |= is_in_block
        return is_in_block or self._present.keeps_glue

    def _value_of(self, value: Any) -> Any:
        if self._present is not None:
            named = value.items() if isinstance(value, Mapping) else [(None, value)]
            number = len(self._present.calls) - 1
            for key, tensor in named:
                if isinstance(tensor, Tensor):
                    self._present.values[id(tensor)] = (tensor, ForwardValue(call=number, key=key))
        return value

    def noted(self, stage: int, index: int) -> list[Any]:
        """What a microbatch gave to logs and metrics, with the tensors as they are in the step."""
        notes = self._notes[stage, index]
        return [[call.value for call in notes.logs], [call.arguments for call in notes.calls]]

    def settle(self, stage: int, index: int, noted: Sequence[Any]) -> None:
        """Take values in the place of those of ``noted``, and cut them off from the graph."""
        notes = self._notes[stage, index]
        values, arguments = tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, noted)
        notes.logs = [replace(call, value=value) for call, value in zip(notes.logs, values, strict=True)]
        notes.calls = [replace(call, arguments=args) for call, args in zip(notes.calls, arguments, strict=True)]
        notes.values = {}

    def joined(self, stage: int, sizes: Sequence[int]) -> tuple[list[LogCall], list[MetricCall]]:
        """The calls that one step on the whole batch would have made on a stage.

        Args:
            stage: Index of the stage.
            sizes: Samples in each microbatch.

        Raises:
            StepError: the microbatches made calls that can't be joined.
        """
        notes = [self._notes[stage, index] for index in range(len(sizes))]
        return join_logs([n.logs for n in notes], sizes), join_calls([n.calls for n in notes], sizes)
