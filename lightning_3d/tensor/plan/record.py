"""A record of a block's calls, in one unsharded run on fake tensors, which `replay` takes for each try of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.sharding.interpret import Interpreter
from lightning_3d.sharding.rules.call import InputPlacement, TorchCall
from lightning_3d.sharding.rules.function import Function, tensors_in
from lightning_3d.tensor.plan.assumed_values import AssumedValues, without_data
from lightning_3d.tensor.plan.fakes import on_fakes
from lightning_3d.tensor.plan.planned_axis import PlannedAxis, PlannedCollective
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.modules import buffers_of
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import base_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The results of a call, for all replays in which its operands lie alike."""

    results: Sequence[Tensor]
    """The tensors in the places of the recorded ones."""

    as_they_lie: Sequence[int]
    """Operands by position that the call takes as they lie."""

    moved: Sequence[tuple[int, InputPlacement]]
    """The others, and what the call needs them to be."""

    sums: Sequence[PlannedCollective]
    """The results that are summed over the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedCall:
    """A call that a block's code made, and what it got."""

    call: TorchCall

    operands: Sequence[int]
    """The ids of its tensors."""

    output: Any

    results: Sequence[Tensor]
    """The tensors in it."""

    cls: type[torch.autograd.Function] | None
    """The custom autograd function that was applied, if one was."""

    written: Sequence[Tensor]
    """The tensor that it changes in place, if any, and the one that this is a view of."""

    has_gradient: bool
    """Whether autograd recorded."""

    answers: dict[tuple[object, ...], Answer] = field(default_factory=dict)
    """By how its operands lie."""


@dataclass(kw_only=True, slots=True)
class Record:
    """One unsharded run of a block on fake tensors."""

    parameters: Mapping[str, Tensor]
    """By name, ties under every name."""

    args: tuple[Any, ...]

    calls: list[RecordedCall] = field(default_factory=list)

    outputs: Sequence[Any] = ()
    """Leaves."""

    buffers: Sequence[Tensor] = ()
    """The block's, after the run."""

    read_data: bool = False


def record_block(block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Record:
    """Run a block's forward on fake tensors, and write down its calls.

    Raises:
        Exception: whatever the block raises on fake tensors.
    """
    with on_fakes(block, args, kwargs) as fakes, torch.enable_grad():
        record = Record(parameters=fakes.parameters, args=fakes.args)
        recorder, assumed = _Recorder(record), AssumedValues()
        with assumed, recorder, custom_functions_seen(recorder.on_custom_function):
            output = block.forward(*fakes.args, **fakes.kwargs)
        record.outputs, record.read_data = tree_leaves(output), assumed.were_read
        record.buffers = [b for module in block.modules() for b in buffers_of(module).values() if b is not None]
    return record


class _Recorder(Interpreter):
    """Writes down the calls that a simulation answers."""

    sees_all = True

    def __init__(self, record: Record) -> None:
        super().__init__(PlannedAxis(1))
        self._record = record

    def dispatch(self, call: TorchCall) -> Any:
        call = TorchCall(without_data(call.function), call.name, call.args, call.kwargs)
        return self._written_down(call, None)

    def on_custom_function(
        self, cls: type[torch.autograd.Function], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        return self._written_down(TorchCall(function, cls.__name__, args, kwargs), cls)

    def _written_down(self, call: TorchCall, cls: type[torch.autograd.Function] | None) -> Any:
        output = self.run_plain(call)
        changed = call.destination
        written = [] if changed is None else [tensor for tensor in (changed, base_of(changed)) if tensor is not None]
        made = RecordedCall(
            call=call,
            operands=[id(tensor) for tensor in call.tensors],
            output=output,
            results=tensors_in(output),
            cls=cls,
            written=written,
            has_gradient=torch.is_grad_enabled(),
        )
        self._record.calls.append(made)
        return output
