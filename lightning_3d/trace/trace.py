"""The dataflow of a step: which calls it makes on tensors that come out of blocks, what each consumes and produces.

``tracer.py`` finds it, ``planning/stage_flow.py`` cuts it, ``pipeline/stage_run.py`` follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from lightning_3d.errors import TraceError
from lightning_3d.torch_internals.pytree import Arguments, TreeSpec
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.side_outputs import HookCall, SideOutputs
from lightning_3d.trace.storages import StepStorages


@dataclass(frozen=True, kw_only=True)
class Result:
    """One leaf of what a call returned: one of its arguments, a new tensor, or a constant."""

    argument: int | None = None
    """Position among the flat arguments of the call."""
    result: int | None = None
    """Index of an earlier output leaf that is the same tensor."""
    tensor: int | None = None
    """Id of a new tensor."""
    constant: object = None


@dataclass(frozen=True, kw_only=True)
class TracedCall:
    """A call that has a tensor of some block among its arguments, or the call of a block."""

    name: str
    """FQN of the block, or name of the torch function."""
    is_block: bool
    call_index: int
    """How many calls of the same block came before."""
    where: str
    """File, line and function of the user's code."""
    inputs: tuple[int, ...]
    """Ids of the tensors consumed."""
    parameters: tuple[str, ...]
    """FQNs of the parameters and buffers that a glue call consumes."""
    results: tuple[Result, ...]
    spec: TreeSpec
    mutated: Mapping[int, int]
    """Position among the flat arguments -> id of the tensor's new value, for in-place calls."""
    is_random: bool
    """Whether it draws random numbers."""
    options: tuple[bool | int | str, ...] = ()
    """Flags, dims and words among its arguments, such as how a loss is reduced."""
    aliased: Mapping[int, int] = field(default_factory=dict)
    """Tensor that shares memory with one that an in-place call changes -> id of its new value."""
    mutually_aliased: frozenset[int] = frozenset()
    """Ids of tensors consumed that share memory with another one of them, and change in place."""
    side: SideOutputs = field(default_factory=SideOutputs)
    """Outputs of the block besides its return value."""

    @property
    def outputs(self) -> tuple[int, ...]:
        """Ids of the tensors that it makes."""
        new = tuple(result.tensor for result in self.results if result.tensor is not None)
        return (*new, *self.mutated.values(), *self.aliased.values())

    def answer(self, arguments: Sequence[object], make: Callable[[int, Result], object]) -> list[object]:
        """The flat results of the call.

        Args:
            arguments: Its flat arguments, some of which may be results.
            make: Makes a new tensor or a constant, given its position.
        """
        leaves: list[object] = []
        for position, result in enumerate(self.results):
            if result.argument is not None:
                leaves.append(arguments[result.argument])
            elif result.result is not None:
                leaves.append(leaves[result.result])
            else:
                leaves.append(make(position, result))
        return leaves


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The dataflow of one step for one batch signature."""

    calls: tuple[TracedCall, ...]
    tensors: Mapping[int, TensorMeta]
    returned: frozenset[int]
    """Ids of the tensors that the step returns or logs, or that were alive where the trace stopped."""
    stopped_by: str | None
    """Why the trace ended before the step did, after the last block: the rest runs unseen on the last stage."""
    block_inputs: Mapping[str, Arguments] = field(repr=False)
    """Block FQN -> arguments of its first call, tensors as ``TensorMeta``."""
    kept_hooks: Mapping[str, frozenset[HookCall]] = field(default_factory=dict)
    """Block FQN -> forward hooks in it that change outputs, and so are part of the block."""
    unsent_attributes: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Block FQN -> names in the block of attributes that its forward changes otherwise than by setting tensors."""
    changed_buffers: frozenset[str] = frozenset()
    """FQNs of buffers that their block's forward changes."""
    host_position: int = 0
    """How far it moved the generators of Python and NumPy, from where all traces begin."""
    calls_collectives: bool = False
    """Whether glue calls collectives over the replicas."""
    has_side_effects: bool = False
    """Whether the step does or gives more than floating-point numbers, which can be joined over microbatches: metrics,
    changes of attributes, tensors of several elements, or what depends on data of blocks."""
    not_microbatchable: str | None = None
    """Why microbatches, on several stages, can't do what the step does once for a batch: a block logs or updates a
    metric, glue changes parameters in place, or modules hold random generators."""
    of_batch: tuple[str, ...] = field(default=(), repr=False)
    """Names of the functions that glue calls on the batch alone."""
    storages: StepStorages | None = field(default=None, repr=False)
    """The memory of its calls, where that was asked for."""

    @property
    def path(self) -> Hashable:
        """The calls that the step makes, whatever the sizes of its tensors and the numbers that it computes with."""
        calls = tuple(
            (call.name, call.where, call.options, call.inputs, call.parameters, call.outputs) for call in self.calls
        )
        return calls, self.of_batch, self.returned, self.stopped_by

    @property
    def block_calls(self) -> tuple[TracedCall, ...]:
        """The calls of blocks, in order."""
        return tuple(call for call in self.calls if call.is_block)

    @cached_property
    def readers(self) -> Mapping[int, str]:
        """Id of a tensor -> FQN of the first block that gets it."""
        return {i: call.name for call in reversed(self.block_calls) for i in call.inputs}

    def refuse_what_counts_once(self) -> None:
        """Raise where microbatches, on several stages, can't do what counts once for the batch.

        Raises:
            TraceError: a block logs, or updates a metric, glue changes parameters, or modules hold random generators.
        """
        if self.not_microbatchable is not None:
            raise TraceError(
                f"{self.not_microbatchable}. With a pipeline blocks run once for each microbatch, on one stage each,"
                " and the code around them on all. Make the call in the step, change parameters in on_train_batch_end,"
                " draw from the default generators, or set pipeline.mode=inline."
            )

    @property
    def block_side_effects(self) -> list[tuple[str, SideOutputs]]:
        """Name of the block and side outputs, for each call of a block."""
        return [(call.name, call.side) for call in self.block_calls]
