"""Tracing a step: running it once with every block absent, and writing down what it does to what blocks return.

A block answers with ghosts whose shapes come from running it on fake tensors. A glue call with a ghost among its
arguments is recorded, and run on fake tensors too. A glue call without one (masks, positions: derived from the batch)
runs for real, and will on every stage. A glue call on parameters alone also runs on every stage; here its result is a
ghost without an id, since parameters may be sharded or absent.

With data, as glue has them without a pipeline, blocks and recorded calls run for real in place of on fake tensors, on
copies of the model's weights, and glue may read what they give.

Nothing here communicates, and the model's weights are not changed; without data they are not even read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_3d.errors import TraceError
from lightning_3d.model.block_runner import AnyCallable, BlockRunner
from lightning_3d.model.pytrees import as_called, register_dataclasses, tensor_positions
from lightning_3d.torch_internals.dispatch import SET_DATA
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.modules import forward_hook_registries, named_state
from lightning_3d.torch_internals.pytree import Arguments, Kwargs, TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from lightning_3d.torch_internals.tensors import are_transforms_active, storage_id, untransformed, version_of
from lightning_3d.trace.fake_blocks import Copies, FakeBlocks, Fakes, RandomnessSeen
from lightning_3d.trace.ghost import Ghost, TensorMeta
from lightning_3d.trace.interception import DEVICE_GETTERS, Router, StepMode
from lightning_3d.trace.refusals import (
    DIFFERENTIATING,
    MISTAKES,
    calls_blocks_unseen,
    check_arguments,
    check_constant,
    check_layout,
    explained,
    gradient_refused,
    transformed,
    user_frame,
)
from lightning_3d.trace.side_outputs import HookCall, SideOutputs, call_hook, call_own_hooks, unpack_outputs
from lightning_3d.trace.storages import StorageNotes
from lightning_3d.trace.trace import Result, Trace, TracedCall

_MAX_DIMS = 8  # of tensors: greater integers are sizes


def trace_step(
    step: Callable[[], object],
    module: nn.Module,
    router: Router,
    device: torch.device,
    *,
    calls_all: bool,
    with_data: bool = False,
    notes_storages: bool = False,
) -> Trace:
    """Trace ``step``, a call of one of the module's step methods on one microbatch.

    Args:
        step: Runs the step; what it returns counts as consumed by the last stage.
        module: The whole model, for the names of parameters.
        router: The router of its blocks.
        device: Where parameters live when they are at hand.
        calls_all: Whether the step is expected to call all blocks, as in training.
        with_data: Whether to run it for real, at the price of a copy of the model and of its activations.
        notes_storages: Whether to note the memory of its calls.

    Raises:
        TraceError: the step does what can't be followed, or needs data of a block before all blocks were called.
    """
    kept_hooks: dict[str, frozenset[HookCall]] = {}
    registered = [(own, dict(own)) for inner in module.modules() for own in forward_hook_registries(inner)]
    while True:
        try:
            fakes = Copies(device) if with_data else Fakes(device)
            tracer = _Tracer(module, router, fakes, kept_hooks, notes_storages=notes_storages)
            return tracer.trace(step, calls_all=calls_all)
        except _HookChangesOutput as change:  # it is part of its block: trace again, with the hook left there
            kept_hooks[change.fqn] = kept_hooks.get(change.fqn, frozenset()) | {change.hook}
            for own, hooks in registered:  # the step may not have come to where it removes a hook of its own
                if own != hooks:
                    own.clear()
                    own.update(hooks)


class _HookChangesOutput(BaseException):
    """A forward hook inside of a block returned something, or wrote to what the module got or gave. Not an
    ``Exception``, so that no user code catches it.
    """

    def __init__(self, fqn: str, hook: HookCall) -> None:
        super().__init__(fqn, hook)
        self.fqn, self.hook = fqn, hook


class _Tracer(StepMode):
    def __init__(
        self,
        module: nn.Module,
        router: Router,
        fakes: Copies,
        kept_hooks: Mapping[str, frozenset[HookCall]],
        *,
        notes_storages: bool,
    ) -> None:
        super().__init__(router)
        self._calls: list[TracedCall] = []
        self._of_batch: list[str] = []
        self._tensors: dict[int, TensorMeta] = {}
        self._ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> id of its present value
        self._block_inputs: dict[str, Arguments] = {}
        self._failed_call: str | None = None
        self._failed_in_block = self._is_joint = False
        self._fakes, self._kept_hooks = fakes, kept_hooks
        self._blocks = FakeBlocks(module, router.blocks, self._fakes, kept_hooks)
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> FQNs of parameters it comes from
        self._written: dict[int, tuple[torch.UntypedStorage, str]] = {}  # storage that a ghost was written to -> where
        self._counts_once: str | None = None
        self._num_calls: dict[str, int] = {}
        self._state = {tensor: fakes.of_state(tensor) for _, tensor, _ in named_state(module)}
        for name, tensor, _ in named_state(module):
            if isinstance(tensor, nn.Parameter) or tensor in self._blocks.tensors:
                self._sources[tensor] = frozenset({name})
        self._storages = StorageNotes(self._state.values()) if notes_storages else None

    def trace(self, step: Callable[[], object], *, calls_all: bool) -> Trace:
        """Run ``step`` and give what was written down."""
        output, stopped_by, alive = None, None, set[int]()
        try:
            with self:
                output = step()
        except TraceError:
            raise
        except Exception as error:
            if self._failed_call is None or self._fakes.fake_mode is None:
                raise
            if self._failed_in_block and isinstance(error, MISTAKES):
                raise
            missing = [fqn for fqn in self._router.blocks if fqn not in self._block_inputs] if calls_all else []
            if self._failed_in_block or missing:
                raise explained(error, self._failed_call, missing, in_block=self._failed_in_block) from error
            stopped_by = f"{self._failed_call}: {type(error).__name__}"
            alive = set(self._ids.values())  # while the error holds the frames
        register_dataclasses(output)
        leaves = tree_leaves(output)
        returned = alive | {self._ids[leaf] for leaf in leaves if isinstance(leaf, Tensor) and leaf in self._ids}
        return Trace(
            calls=tuple(self._calls),
            tensors=self._tensors,
            returned=frozenset(returned),
            stopped_by=stopped_by,
            block_inputs=self._block_inputs,
            kept_hooks=self._kept_hooks,
            unsent_attributes=self._blocks.unsent_attributes,
            changed_buffers=frozenset(self._blocks.changed_buffers),
            calls_collectives=self._is_joint,
            has_side_effects=bool(self._written) or stopped_by is not None,
            not_microbatchable=self._counts_once,
            of_batch=tuple(self._of_batch),
            storages=None if self._storages is None else self._storages.storages,
        )

    # ---- answers

    @override
    def __torch_function__(
        self, func: AnyCallable, types: object, args: tuple[Any, ...] = (), kwargs: Kwargs | None = None
    ) -> object:
        if func in DEVICE_GETTERS and args[0] in self._state:
            return func(self._state[args[0]])  # parameters are moved after the trace
        return super().__torch_function__(func, types, args, kwargs)

    @override
    def on_collective(
        self, name: str, joint: Callable[[Tensor], Tensor], alone: Callable[[Tensor], Tensor], tensor: Tensor
    ) -> Tensor:
        self._is_joint = True
        return super().on_collective(name, joint, alone, tensor)

    def on_function(self, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        name = getattr(func, "__name__", str(func))
        self._check_followed(tensors, name)
        if are_transforms_active() and any(untransformed(tensor) in self._ids for tensor in tensors):
            raise transformed(name)
        is_recorded = any(tensor in self._ids for tensor in tensors)
        if not is_recorded and not any(tensor in self._sources for tensor in tensors):
            self._of_batch.append(name)
            return func(*args, **kwargs)
        if func == SET_DATA and not is_recorded:
            self._note_change("data", leaves[0])
        if is_recorded and func in DIFFERENTIATING and self._fakes.fake_mode is not None:
            raise gradient_refused(name)
        return self._record(name, leaves, spec, lambda args, kwargs: func(*args, **kwargs), is_recorded=is_recorded)

    @override
    def on_hidden_function(
        self, name: str, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if self._fakes.fake_mode is not None:
            self._check_calls_no_blocks(name, args)
        return super().on_hidden_function(name, call, args, kwargs)

    def _note_change(self, name: str, parameter: object) -> None:
        """A parameter is changed in place, by others perhaps, which microbatches would do several times."""
        names = ", ".join(sorted(self._sources.get(parameter, ())))
        self._counts_once = f"{name} (called at {user_frame()}) changes {names} in place, which a batch does once"

    def _check_calls_no_blocks(self, name: str, args: tuple[object, ...]) -> None:
        """Raise for a custom autograd function that gets blocks, which it would call unseen."""
        inner = {module for leaf in args if isinstance(leaf, nn.Module) for module in leaf.modules()}
        fqns = [fqn for fqn, block in self._router.blocks.items() if block in inner]
        if fqns:
            raise calls_blocks_unseen(name, fqns)

    def on_block(
        self, runner: BlockRunner, call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        fqn, block = runner.fqn, runner.block
        if are_transforms_active():
            raise transformed(fqn)
        register_dataclasses((args, kwargs))
        leaves, spec = tree_flatten((args, kwargs))
        self._check_followed([leaf for leaf in leaves if isinstance(leaf, Tensor)], fqn)
        check_arguments(leaves, fqn)
        for leaf in leaves:
            check_layout(leaf, fqn)
        if fqn not in self._block_inputs:
            metas = [self._described(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._block_inputs[fqn] = as_called(tree_unflatten(metas, spec))
        known = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and self._is_known(leaf)}
        side: list[SideOutputs] = []

        def run(*arguments: object) -> object:
            packed, outputs = self._blocks.run(fqn, block, arguments, known)
            side.append(outputs)
            return packed

        with self.paused():
            packed = self._record(fqn, leaves, spec, run, is_recorded=True, side=side)
            output, hook_values = unpack_outputs(block, packed, (args, kwargs), side[0])
        self._num_calls[fqn] = self._num_calls.get(fqn, 0) + 1
        for hook, values in zip(side[0].hooks, hook_values, strict=True):
            before = self._present_values(values)
            if call_hook(block, hook, values) is not None or self._present_values(values) != before:
                raise _HookChangesOutput(fqn, hook)
        return call_own_hooks(block, args, kwargs, output)

    def _present_values(self, tree: object) -> list[int | None]:
        return [self._ids.get(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]

    def _described(self, tensor: Tensor) -> TensorMeta:
        """A tensor that a block gets, with the values of integers that come from the batch: labels, positions, ids."""
        is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        return TensorMeta.of(tensor, tensor.detach() if is_integer and self._is_known(tensor) else None)

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether its data comes from the batch alone."""
        is_real = not isinstance(tensor, (Ghost, FakeTensor)) and not tensor.is_meta
        return is_real and tensor not in self._ids and tensor not in self._sources

    def _check_followed(self, tensors: list[Tensor], name: str) -> None:
        """Raise for tensors of blocks that came here by ways that a stage can't follow."""
        for tensor in tensors:
            if tensor in self._ids or tensor in self._sources:
                continue
            if isinstance(tensor, (Ghost, FakeTensor)):
                raise TraceError(
                    f"{name} (called at {user_frame()}) got a tensor that a block made, of shape"
                    f" {tuple(tensor.shape)}, which the block did not return in this step. Return it from the block's"
                    " forward, and don't keep it from one step to the next."
                )
            if self._written and storage_id(tensor.untyped_storage()) in self._written:
                _, where = self._written[storage_id(tensor.untyped_storage())]
                raise TraceError(
                    f"{name} (called at {user_frame()}) reads a tensor into which a block's output was written through"
                    f" a view (at {where}), so a pipeline stage that lacks the output would read the old values. Write"
                    " to the tensor itself (x[...] = y), or build it with torch.stack or torch.cat."
                )

    # ---- calls

    def _record(
        self,
        name: str,
        leaves: list[Any],
        spec: TreeSpec,
        run: Callable[..., Any],
        *,
        is_recorded: bool,
        side: Sequence[SideOutputs] | None = None,
    ) -> object:
        """Run a call on fakes and write it down.

        Args:
            run: Called with the fake (args, kwargs).
            side: The side outputs of a block, whose call fills them in.
        """
        where, is_block = user_frame(), side is not None
        self._failed_call, self._failed_in_block = f"{name} at {where}", is_block
        fakes = [self._fakes.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [version_of(fake) if isinstance(fake, Tensor) else 0 for fake in fakes]
        inputs = tuple(self._ids[leaf] for leaf in leaves if isinstance(leaf, Tensor) and leaf in self._ids)
        sources = frozenset[str]().union(
            *(self._sources.get(leaf, frozenset()) for leaf in leaves if isinstance(leaf, Tensor))
        )
        noting = nullcontext() if self._storages is None else self._storages.noting()
        with self._fakes.mode(), RandomnessSeen() as randomness, noting as noted:
            output = run(*tree_unflatten(fakes, spec))
        register_dataclasses(output)
        outputs, out_spec = tree_flatten(output)
        for leaf in outputs:
            check_layout(leaf, name)
        if is_block:
            for leaf in tree_leaves(output[0]):
                check_constant(leaf, name, where)
        self._failed_call = None

        changed = [i for i in tensor_positions(fakes).values() if is_recorded and version_of(fakes[i]) != versions[i]]
        aliased = self._retag_aliases([(leaves[i], fakes[i]) for i in changed], where) if changed else {}
        mutually_aliased = self._entangled([(leaves[i], fakes[i]) for i in changed])
        mutated = {i: self._new_id(leaves[i], fakes[i]) for i in changed}
        results, answer = self._answers(outputs, fakes, leaves, None if is_recorded else sources)
        if is_recorded:
            if self._storages is not None and noted is not None:
                self._storages.add_call(noted, fakes, outputs)
            self._calls.append(
                TracedCall(
                    name=name,
                    is_block=is_block,
                    call_index=self._num_calls.get(name, 0) if is_block else 0,
                    where=where,
                    inputs=inputs,
                    parameters=tuple(sorted(sources)),
                    results=tuple(results),
                    spec=out_spec,
                    mutated=mutated,
                    is_random=randomness.seen,
                    options=tuple(filter(_is_option, () if is_block else leaves)),
                    aliased=aliased,
                    mutually_aliased=mutually_aliased,
                    side=side[0] if side else SideOutputs(),
                )
            )
        elif fakes and isinstance(fakes[0], Tensor) and version_of(fakes[0]) != versions[0]:
            self._note_change(name, leaves[0])
        return tree_unflatten(answer, out_spec)

    def _answers(
        self,
        outputs: Sequence[object],
        fakes: Sequence[object],
        leaves: Sequence[object],
        sources: frozenset[str] | None,
    ) -> tuple[list[Result], list[object]]:
        """Describe the outputs of a call, and make what its caller gets: ghosts, its own arguments, or constants.

        Args:
            outputs: With fake tensors.
            fakes: The arguments that it got, in place of ``leaves``.
            sources: FQNs of the parameters behind a call that is not recorded.
        """
        results: list[Result] = []
        answer: list[object] = []
        arguments, earlier = tensor_positions(fakes), dict[int, int]()
        for position, output in enumerate(outputs):
            if not isinstance(output, Tensor):
                results.append(Result(constant=output))
                answer.append(output)
            elif id(output) in arguments:
                results.append(Result(argument=arguments[id(output)]))
                answer.append(leaves[arguments[id(output)]])
            elif id(output) in earlier:
                results.append(Result(result=earlier[id(output)]))
                answer.append(answer[earlier[id(output)]])
            else:
                earlier[id(output)] = position
                ghost = Ghost(TensorMeta.of(output))
                self._fakes.put(ghost, output)
                if sources is not None:
                    self._sources[ghost] = sources
                results.append(Result(tensor=self._new_id(ghost, output) if sources is None else None))
                answer.append(ghost)
        return results, answer

    def _new_id(self, tensor: Tensor, fake: Tensor) -> int:
        new = len(self._tensors)
        self._tensors[new] = TensorMeta.of(fake)
        self._ids[tensor] = new
        if self._storages is not None:
            self._storages.add_tensor(new, fake)
        return new

    def _retag_aliases(self, mutated: list[tuple[Tensor, Tensor]], where: str) -> dict[int, int]:
        """Give a new id to every tensor that shares memory with one that was changed in place."""
        storages = {storage_id(fake.untyped_storage()) for _, fake in mutated}
        changed = {id(tensor) for tensor, _ in mutated}
        for tensor, _ in mutated:
            if self._is_known(tensor):
                storage = tensor.untyped_storage()
                self._written[storage_id(storage)] = (storage, where)
        aliases = [
            (tensor, i)
            for tensor, i in self._ids.items()
            if id(tensor) not in changed and storage_id(self._fakes.of(tensor).untyped_storage()) in storages
        ]
        return {i: self._new_id(tensor, self._fakes.of(tensor)) for tensor, i in aliases}

    def _entangled(self, mutated: list[tuple[Tensor, Tensor]]) -> frozenset[int]:
        """Ids of tensors that one call changes in place, and that share memory."""
        by_storage: dict[int, set[int]] = defaultdict(set)
        for tensor, fake in mutated:
            if tensor in self._ids:
                by_storage[storage_id(fake.untyped_storage())].add(self._ids[tensor])
        return frozenset(i for sharing in by_storage.values() if len(sharing) > 1 for i in sharing)


def _is_option(leaf: object) -> bool:
    """Whether an argument says how a call is made: a flag, a word, or an integer that may be a dim."""
    return type(leaf) in (bool, str) or (type(leaf) is int and -_MAX_DIMS <= leaf < _MAX_DIMS)
