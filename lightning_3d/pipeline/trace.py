"""Tracing a step: which calls it makes on tensors that come out of blocks, and what each consumes and produces.

The user's step runs once with every block absent: a block answers with ghosts whose shapes come from running it on
fake tensors. A glue call with a ghost among its arguments is an *event*, run on fake tensors too. A glue call without
one (masks, positions: derived from the batch) runs for real, and will on every stage. A glue call on parameters alone
also runs on every stage; here its result is a ghost without an id, since parameters may be sharded or absent.

Nothing here communicates, and the model's weights are neither read nor changed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import TraceError
from lightning_3d.pipeline.ghost import Ghost, TensorMeta
from lightning_3d.pipeline.interception import Call, Router, StepMode, own_forward
from lightning_3d.state import named_state


@dataclass(frozen=True, kw_only=True)
class Result:
    """One leaf of what a call returned: one of its arguments, a new tensor, or a constant."""

    argument: int | None = None
    """Position among the flat arguments of the call."""
    tensor: int | None = None
    """Id of a new tensor."""
    constant: Any = None


@dataclass(frozen=True, kw_only=True)
class Event:
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

    @property
    def outputs(self) -> tuple[int, ...]:
        """Ids of the tensors that it makes."""
        new = tuple(result.tensor for result in self.results if result.tensor is not None)
        return (*new, *self.mutated.values())


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The dataflow of one step for one batch signature."""

    events: tuple[Event, ...]
    tensors: Mapping[int, TensorMeta]
    returned: frozenset[int]
    """Ids of the tensors that the step returns or logs, or that were alive where the trace stopped."""
    stopped_by: str | None
    """Why the trace ended before the step did, after the last block: the rest runs unseen on the last stage."""
    block_inputs: Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(repr=False)
    """Block FQN -> arguments of its first call, tensors as ``TensorMeta``."""

    @property
    def block_calls(self) -> tuple[Event, ...]:
        """The calls of blocks, in order."""
        return tuple(event for event in self.events if event.is_block)


def trace_step(
    step: Callable[[], Any],
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    router: Router,
    device: torch.device,
    *,
    calls_all: bool,
) -> Trace:
    """Trace ``step``, a call of one of the module's step methods on one microbatch.

    Args:
        step: Runs the step; what it returns counts as consumed by the last stage.
        module: The whole model, for the names of parameters.
        blocks: FQN -> block, routed by ``router``.
        device: Where parameters live when they are at hand.
        calls_all: Whether the step is expected to call all blocks, as in training.

    Raises:
        TraceError: the step needs data of a block before all blocks were called, or a block can't run on fake tensors.
    """
    tracer = _Tracer(module, blocks, router, device)
    output, stopped_by = None, None
    try:
        with tracer:
            output = step()
    except TraceError:
        raise
    except Exception as error:
        if tracer.failed_call is None:
            raise
        missing = [fqn for fqn in blocks if fqn not in tracer.block_inputs] if calls_all else []
        if tracer.failed_in_block or missing:
            raise _explained(error, tracer.failed_call, missing, in_block=tracer.failed_in_block) from error
        stopped_by = f"{tracer.failed_call}: {type(error).__name__}"
    returned = {tracer.ids[leaf] for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor) and leaf in tracer.ids}
    if stopped_by is not None:
        returned |= {i for _, i in tracer.ids.items()}
    return Trace(
        events=tuple(tracer.events),
        tensors=tracer.tensors,
        returned=frozenset(returned),
        stopped_by=stopped_by,
        block_inputs=tracer.block_inputs,
    )


def _explained(error: Exception, failed_call: str, missing: list[str], *, in_block: bool) -> TraceError:
    cause = f"({type(error).__name__}: {error})"
    if in_block:
        return TraceError(
            f"Block {failed_call} failed on fake tensors, which tell the shapes of its outputs {cause}. If it fails in"
            " one process too, mend the model; else name finer or coarser blocks with pipeline.partition='type:REGEX'."
        )
    before = f"before the blocks {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''} were called"
    if _needs_data(error):
        return TraceError(
            f"The step can't be traced: {failed_call} needs the data of a tensor that comes from a block, {before}"
            f" {cause}. Pipeline and tensor parallel plan without data, and with a pipeline the data may be on another"
            " rank: move the call into a block, or after the last block."
        )
    return TraceError(
        f"The step can't be traced: {failed_call} failed on fake tensors, {before} {cause}. If it fails in one process"
        " too, mend the model; else move the call into a block, or after the last block."
    )


def _needs_data(error: Exception) -> bool:
    if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
        return True
    return isinstance(error, RuntimeError) and ".numpy() is not supported" in str(error)


class _Tracer(StepMode):
    def __init__(self, module: nn.Module, blocks: Mapping[str, nn.Module], router: Router, device: torch.device):
        super().__init__(router)
        self.events: list[Event] = []
        self.tensors: dict[int, TensorMeta] = {}
        self.ids: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> id of its present value
        self.block_inputs: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.failed_call: str | None = None
        self.failed_in_block = False
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # ghost or real tensor -> fake tensor
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> FQNs of parameters it comes from
        self._calls: dict[str, int] = {}
        self._device = device
        self._block_state: dict[str, dict[str, Tensor]] = {fqn: {} for fqn in blocks}
        owners = {inner: (fqn, name) for fqn, block in blocks.items() for name, inner in block.named_modules()}
        in_block: set[Tensor] = set()
        for name, tensor, owner in named_state(module):
            fake = self._fake_state(tensor)
            if owner in owners:
                fqn, _ = owners[owner]
                self._block_state[fqn][name.removeprefix(f"{fqn}.")] = fake
                in_block.add(tensor)
            if isinstance(tensor, nn.Parameter) or tensor in in_block:
                self._sources[tensor] = frozenset({name})

    def _fake_state(self, tensor: Tensor) -> Tensor:
        if tensor not in self._fakes:
            with self._fake_mode:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
            self._fakes[tensor] = fake.requires_grad_(tensor.requires_grad)
        fake_state: Tensor = self._fakes[tensor]
        return fake_state

    def on_function(self, func: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        is_event = any(tensor in self.ids for tensor in tensors)
        if not is_event and not any(tensor in self._sources for tensor in tensors):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        return self._record(name, leaves, spec, lambda a, k: func(*a, **k), is_event=is_event)

    def on_block(self, fqn: str, block: nn.Module, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        if fqn not in self.block_inputs:
            metas = [TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self.block_inputs[fqn] = tree_unflatten(metas, spec)

        with self.paused():
            output = self._record(
                fqn,
                leaves,
                spec,
                lambda a, k: run_on_fakes(block, self._block_state[fqn], a, k),
                is_event=True,
                is_block=True,
            )
        self._calls[fqn] = self._calls.get(fqn, 0) + 1
        return output

    def _record(
        self,
        name: str,
        leaves: list[Any],
        spec: TreeSpec,
        run: Callable[[Any, Any], Any],
        *,
        is_event: bool,
        is_block: bool = False,
    ) -> Any:
        where = _user_frame()
        self.failed_call, self.failed_in_block = f"{name} at {where}", is_block
        fakes = [self._fake(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        versions = [fake._version if isinstance(fake, Tensor) else 0 for fake in fakes]
        arguments = {id(fake): i for i, fake in reversed(list(enumerate(fakes))) if isinstance(fake, Tensor)}
        inputs = tuple(self.ids[leaf] for leaf in leaves if isinstance(leaf, Tensor) and leaf in self.ids)
        sources = frozenset[str]().union(
            *(self._sources.get(leaf, frozenset()) for leaf in leaves if isinstance(leaf, Tensor))
        )
        with self._fake_mode, _RandomnessSeen() as randomness:
            outputs, out_spec = tree_flatten(run(*tree_unflatten(fakes, spec)))
        self.failed_call = None

        mutated: dict[int, int] = {}
        for i, (fake, version) in enumerate(zip(fakes, versions, strict=True)):
            if isinstance(fake, Tensor) and fake._version != version and is_event and arguments[id(fake)] == i:
                mutated[i] = self._new_id(leaves[i], fake)
        results, answer = [], []
        for output in outputs:
            if isinstance(output, Tensor) and id(output) in arguments:
                results.append(Result(argument=arguments[id(output)]))
                answer.append(leaves[arguments[id(output)]])
            elif isinstance(output, Tensor):
                ghost = Ghost(TensorMeta.of(output))
                self._fakes[ghost] = output
                results.append(Result(tensor=self._new_id(ghost, output) if is_event else None))
                if not is_event:
                    self._sources[ghost] = sources
                answer.append(ghost)
            else:
                _check_constant(output, name, where)
                results.append(Result(constant=output))
                answer.append(output)
        if is_event:
            self.events.append(
                Event(
                    name=name,
                    is_block=is_block,
                    call_index=self._calls.get(name, 0) if is_block else 0,
                    where=where,
                    inputs=inputs,
                    parameters=tuple(sorted(sources)),
                    results=tuple(results),
                    spec=out_spec,
                    mutated=mutated,
                    is_random=randomness.seen,
                )
            )
        return tree_unflatten(answer, out_spec)

    def _fake(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self._fakes:
            self._fakes[tensor] = self._fake_mode.from_tensor(tensor)
        fake: Tensor = self._fakes[tensor]
        return fake

    def _new_id(self, tensor: Tensor, fake: Tensor) -> int:
        new = len(self.tensors)
        self.tensors[new] = TensorMeta.of(fake)
        self.ids[tensor] = new
        return new


class _RandomnessSeen(TorchDispatchMode):
    """Notes whether an operator that draws random numbers was called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def run_on_fakes(block: nn.Module, state: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the block's own forward with ``state`` in place of its parameters and buffers, past hooks and wrappers."""
    return torch.func.functional_call(
        _ForwardOnly(block), {f"block.{name}": tensor for name, tensor in state.items()}, args, kwargs
    )


class _ForwardOnly(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return own_forward(self.block)(*args, **kwargs)


def _check_constant(value: Any, name: str, where: str) -> None:
    if value is None or isinstance(
        value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
    ):
        return
    if any(isinstance(member, Tensor) for member in getattr(value, "__dict__", {}).values()):
        raise TraceError(
            f"{name} (called at {where}) returned a {type(value).__name__} that holds tensors and is not a pytree, so"
            " they can't be sent to another pipeline stage. Return a tensor, tuple, list, dict or NamedTuple, or"
            " register the class with torch.utils._pytree.register_dataclass."
        )


def _user_frame() -> str:
    """Where the innermost frame outside torch and this package stands."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "lightning_3d", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"
