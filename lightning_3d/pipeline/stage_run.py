"""Running one microbatch on one stage: own calls for real, calls of other stages as ghosts.

Every stage runs the user's whole step. It counts calls along the trace; when the last tensor that must be sent exists,
it leaves the user's code by ``StageExit``. The last stage runs on into the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import TraceError
from lightning_3d.model.block_runner import SUMMON, AnyCallable, BlockRunner
from lightning_3d.model.pytrees import flatten_call
from lightning_3d.pipeline.glue_seen import HandedOver
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor.vocabulary.lazy_tensor import made
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_3d.torch_internals.tensors import storage_of
from lightning_3d.trace.ghost import Ghost
from lightning_3d.trace.interception import Router, StepMode
from lightning_3d.trace.refusals import DIFFERENTIATING, gradient_refused, user_frame
from lightning_3d.trace.side_outputs import (
    SideOutputs,
    call_hook,
    call_own_hooks,
    hooks_noted,
    pack_outputs,
    unpack_outputs,
)
from lightning_3d.trace.trace import Result, TracedCall


class StageExit(BaseException):
    """Leaves the user's step once the stage has made all that it sends. Not an ``Exception``, so that no user code
    catches it.
    """


Draw = Callable[[AnyCallable, Args, Kwargs], object]
"""Makes a call of glue on the batch alone, which may draw random numbers."""


def plain_call(func: AnyCallable, args: Args, kwargs: Kwargs) -> object:
    """Make it as it is."""
    return func(*args, **kwargs)


Crossing = Callable[[int, Tensor], Tensor]
"""Gives a tensor, whose id in the trace this is, as it goes from stage to stage, or what came so as the step has it."""


def as_it_is(i: int, tensor: Tensor) -> Tensor:
    """The tensor."""
    return tensor


class StageRun(StepMode):
    """One run of the user's step on one microbatch by one stage.

    Args:
        router: The router of the model's blocks.
        flow: The trace of this batch signature, cut into stages.
        stage: Index of this stage.
        received: The tensors of ``flow.received(stage)``.
        randomness: Number of a call -> context in which it draws random numbers of this stage's own.
        draw: Makes the calls that get no tensors of blocks.
        ends_in_trace: Whether the loss is to be made before the trace is stopped by code that reads data of blocks.
        handed: Notes what glue computes from the batch alone for the calls of the trace.
        received_as: Gives what was received as the step has it, where that has slices; called while it runs.
        sent_as: Gives a tensor of the step as it is sent.
    """

    has_replicas = True

    def __init__(
        self,
        router: Router,
        flow: StageFlow,
        stage: int,
        received: Sequence[Tensor],
        randomness: Callable[[int], AbstractContextManager[None]],
        draw: Draw = plain_call,
        *,
        ends_in_trace: bool = False,
        handed: HandedOver | None = None,
        received_as: Crossing = as_it_is,
        sent_as: Crossing = as_it_is,
    ) -> None:
        super().__init__(router)
        self._draw = draw if handed is None else partial(handed.call, draw)
        self._ends_in_trace, self._handed = ends_in_trace, handed
        self._received_as, self._sent_as = received_as, sent_as
        router.guard(flow.trace.unsent_attributes)
        self._randomness = randomness
        self._flow, self._stage = flow, stage
        self._position = 0
        self._ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # ghost or own tensor -> id of its value
        pairs = zip(flow.trace.calls, flow.call_stages, strict=True)
        calls = [call for call, of_call in pairs if of_call == stage]
        mutated = {i for call in calls for i in (*call.inputs, *call.aliased) if call.mutated}
        self._values: dict[int, Tensor] = {  # a received leaf that an own in-place call changes is copied first
            i: tensor.clone() if i in mutated and not isinstance(tensor, Ghost) else tensor
            for i, tensor in zip(flow.received(stage), received, strict=True)
        }
        self._as_sent = set[int]()
        self._at_hand = set(flow.received(stage))  # ids of values received or made here
        self._to_send = dict.fromkeys(flow.sent(stage))
        self._made: dict[int, Tensor] = {}
        self._changing: dict[int | None, Tensor] = {}  # by storage: buffers and others that further microbatches change

    def run(self, step: Callable[[], object]) -> Any:
        """Run the step.

        Returns:
            On the last stage what the step returned, with tensors of earlier stages filled in; on the others the
            tensors to send.
        """
        self._receive()
        if self._stage == self._flow.num_stages - 1:
            with self:
                output = step()
            if self._flow.trace.stopped_by is None and self._position != len(self._flow.trace.calls):
                raise self._changed("the step ended")
            return tree_map(lambda leaf: made(self._value(leaf)), output)
        try:
            with self:
                self._leave_if_done()
                step()
        except StageExit:
            return tuple(self._sendable(i) for i in self._to_send)
        raise self._changed("the step ended")

    def _receive(self) -> None:
        self._values = {i: self._received_as(i, tensor) for i, tensor in self._values.items()}
        self._as_sent = {i for i, tensor in self._values.items() if not isinstance(tensor, Ghost | ShardedTensor)}
        self._made = {i: self._values[i] for i in self._to_send if i in self._values}

    def _sendable(self, i: int) -> Tensor:
        """A tensor that stays as it is while it is sent."""
        tensor = self._sent_as(i, made(self._made[i]))
        is_changing = storage_of(tensor) in self._changing
        return tensor.clone(memory_format=torch.contiguous_format) if is_changing else tensor.contiguous()

    def on_function(self, func: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        leaves, with_leaves = flatten_call(args, kwargs)
        name = getattr(func, "__name__", str(func))
        self._check_ghosts(leaves, name)
        if self._expected is None and func in DIFFERENTIATING:
            raise gradient_refused(name)
        if not any(isinstance(leaf, Tensor) and leaf in self._ids for leaf in leaves):
            return self._draw(func, args, kwargs)

        def run(values: list[object]) -> object:
            value_args, value_kwargs = with_leaves(values)
            return func(*value_args, **value_kwargs)

        return self._on_call(name, False, leaves, run)

    def on_hidden_function(self, name: str, call: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        def on_plain(*args: object, **kwargs: object) -> object:
            args, kwargs = tree_map(partial(made, reader=name), (args, kwargs))
            return call(*args, **kwargs)

        return super().on_hidden_function(name, on_plain, args, kwargs)

    def on_block(self, runner: BlockRunner, call: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        fqn, block = runner.fqn, runner.block
        leaves, with_leaves = flatten_call(args, kwargs)
        self._check_ghosts(leaves, fqn)
        side = SideOutputs() if self._expected is None else self._expected.side
        kept = self._flow.trace.kept_hooks.get(fqn, frozenset())

        def run_block(args: Args, kwargs: Kwargs) -> object:
            if self.is_checkpointing:
                return checkpoint(lambda *args: call(*args, **kwargs), *args, use_reentrant=False)
            return call(*args, **kwargs)

        def run(values: list[object]) -> object:
            with hooks_noted(block, kept) as noted:

                def forward_and_pack(forward: AnyCallable, args: Args, kwargs: Kwargs) -> object:
                    output = forward(*args, **kwargs)
                    if tuple(note.call for note in noted) != side.hooks:
                        raise self._changed(f"{fqn} made other calls of forward hooks")
                    return pack_outputs(block, output, (args, kwargs), side, noted)

                with runner.forward_through(forward_and_pack):
                    return run_block(*with_leaves(values))

        with self.paused():
            packed = self._on_call(fqn, True, leaves, run)
            output, hook_values = unpack_outputs(block, packed, (args, kwargs), side)
        for hook, values in zip(side.hooks, hook_values, strict=True):
            if call_hook(block, hook, values) is not None:
                raise self._changed(f"a forward hook on {fqn}.{hook.module} returned something")
        return call_own_hooks(block, args, kwargs, output)

    @property
    def _expected(self) -> TracedCall | None:
        """The next call of the trace; None at its end."""
        calls = self._flow.trace.calls
        return calls[self._position] if self._position < len(calls) else None

    def _on_call(
        self, name: str, is_block: bool, leaves: list[object], run: Callable[[list[object]], object]
    ) -> object:
        call = self._expected
        if call is None and (reader := self._flow.trace.stopped_by) is not None:
            if is_block:
                raise TraceError(
                    f"{name} was called after code that reads data of blocks ({reader}), as generate() does for every"
                    " token, but with a pipeline a step reads them after its last call of a block. Do it in a hook, as"
                    f" on_validation_epoch_end, {SUMMON}, or use pipeline_parallel_size=1."
                )
            answer = run([self._value(leaf) for leaf in leaves])  # past the end of the trace, on the last stage
            if self._ends_in_trace and any(
                leaf.requires_grad for leaf in tree_leaves(answer) if isinstance(leaf, Tensor)
            ):
                raise self._late(name, reader)
            return answer
        if call is None or (call.name, call.is_block) != (name, is_block):
            raise self._changed(f"it called {name}")
        stage = self._flow.call_stages[self._position]
        if tuple(self._ids[leaf] for leaf in leaves if isinstance(leaf, Tensor) and leaf in self._ids) != call.inputs:
            raise self._changed(f"{name} got other tensors of blocks")
        self._position += 1
        if self._handed is not None:
            self._handed.hand(name, leaves)
        if stage != self._stage:
            return self._skip(call, leaves)
        answer = self._execute(call, leaves, run)
        self._leave_if_done()
        return answer

    def _skip(self, call: TracedCall, leaves: list[object]) -> object:
        def make(position: int, result: Result) -> object:
            if result.tensor is None:
                return result.constant
            ghost = Ghost(self._flow.trace.tensors[result.tensor])
            self._ids[ghost] = result.tensor
            return ghost

        answer = call.answer(leaves, make)
        for position, i in call.mutated.items():
            self._ids[leaves[position]] = i
        self._retag(call.aliased)
        return tree_unflatten(answer, call.spec)

    def _execute(self, call: TracedCall, leaves: list[Any], run: Callable[[list[object]], object]) -> object:
        values = [self._value(leaf) for leaf in leaves]
        self._check_at_hand(values, call)
        changing = [leaves[position] for position in call.mutated if leaves[position] not in self._ids]
        changing += self._router.blocks[call.name].buffers() if call.is_block else ()
        self._changing.update((storage_of(tensor), tensor) for tensor in changing)
        replaced = [self._ids[leaves[position]] for position in call.mutated if leaves[position] in self._ids]
        for old in (*replaced, *call.aliased):  # a later stage may read the value from before this in-place call
            if old in self._made:
                self._made[old] = self._made[old].clone()
        with self._randomness(self._position) if call.is_random else nullcontext():
            outputs, spec = tree_flatten(run(values))
        if len(outputs) != len(call.results) or spec != call.spec:
            raise self._changed(f"{call.name} returned another structure")

        def make(position: int, result: Result) -> object:
            output = outputs[position]
            if result.tensor is not None:
                if output.shape != self._flow.trace.tensors[result.tensor].shape:
                    raise self._changed(f"{call.name} returned a tensor of shape {tuple(output.shape)}")
                output = output.view_as(output) if output in self._ids else output
                self._keep(output, result.tensor, output)
            return output

        answer = call.answer(leaves, make)
        for position, i in call.mutated.items():
            self._keep(leaves[position], i, values[position])
        self._retag(call.aliased)
        return tree_unflatten(answer, call.spec)

    def _retag(self, aliased: Mapping[int, int]) -> None:
        """After an in-place change: what shares memory with the changed tensor has new values."""
        if not aliased:
            return
        for tensor, old in list(self._ids.items()):
            if old in aliased and old in self._at_hand:
                self._keep(tensor, aliased[old], self._values.get(old, tensor))
            elif old in aliased:
                self._ids[tensor] = aliased[old]

    def _keep(self, tensor: Tensor, i: int, value: Tensor) -> None:
        self._ids[tensor] = i
        self._at_hand.add(i)
        if value is not tensor:
            self._values[i] = value
        if i in self._to_send:
            self._made[i] = value

    def _value(self, leaf: object) -> Any:
        """The data behind a ghost."""
        if not isinstance(leaf, Tensor) or leaf not in self._ids:
            return leaf
        i = self._ids[leaf]
        if i not in self._at_hand:
            raise self._changed(f"it used a tensor of shape {tuple(leaf.shape)} that no other stage sent")
        if i in self._as_sent:
            self._as_sent.remove(i)
            self._values[i] = self._flow.trace.tensors[i].laid_out(self._values[i])
        return self._values.get(i, leaf)

    def _check_ghosts(self, leaves: list[object], name: str) -> None:
        if any(isinstance(leaf, Ghost) and leaf not in self._ids for leaf in leaves):
            raise self._changed(f"{name} got a tensor that a block made in an earlier step")

    def _check_at_hand(self, values: list[object], call: TracedCall) -> None:
        absent = [value for value in values if isinstance(value, Tensor) and value.is_meta]
        if not absent:
            return
        names = {
            p: f"{fqn}.{name}" for fqn, block in self._router.blocks.items() for name, p in block.named_parameters()
        }
        named = next((names[value] for value in absent if isinstance(value, nn.Parameter) and value in names), None)
        what = named or f"a tensor of shape {tuple(absent[0].shape)} that was computed from parameters"
        raise TraceError(
            f"Pipeline stage {self._stage}: {call.name} (at {call.where}) reads {what}, of a block on another stage."
            " Code outside of blocks may read only those parameters of blocks that training_step reads there, too. Call"
            " the block itself, read the parameter in training_step as well (with a factor of 0), or use"
            " pipeline_parallel_size=1."
        )

    def _leave_if_done(self) -> None:
        if self._stage < self._flow.num_stages - 1 and len(self._made) == len(self._to_send):
            raise StageExit

    def _late(self, name: str, reader: str) -> TraceError:
        return TraceError(
            f"{name} (called at {user_frame()}) adds to the loss after the step has read data of blocks ({reader}),"
            " which it did not when it was found out how the loss of the batch comes from microbatches. Compute the"
            " whole loss before the step reads data, or set pipeline.loss='whole'."
        )

    def _changed(self, what: str) -> TraceError:
        call = self._expected
        expected = "the end of the step" if call is None else f"{call.name} (at {call.where})"
        return TraceError(
            f"Pipeline stage {self._stage}: it took another path than when it was traced: {what}, where the trace has"
            f" {expected} as call {self._position + 1} of {len(self._flow.trace.calls)}. Control flow may depend on"
            " shapes of the batch, on batch_idx, current_epoch and global_step, and on attributes of modules that are"
            " bools or strings; not on other attributes, random numbers or tensors."
        )
