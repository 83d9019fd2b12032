"""The load of a pipeline stage by each partition method: what ``partition`` balances, counted or measured.

A block is measured on random inputs: how long it takes, or how many bytes it keeps for its backward. Its own forward
runs with its weights on the given device, in the ambient autograd and autocast modes. Nothing of it stays: no gradient,
no changed buffer or attribute, no random number drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import PlanError
from lightning_3d.model.blocks import kind_of
from lightning_3d.model.deferred import DeferredTensor
from lightning_3d.model.snapshot import preserved
from lightning_3d.planning.partition import StageLoad, additive
from lightning_3d.torch_internals.lightning_helpers import random_states_kept
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.trace.fake_blocks import random_like, with_state
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Trace

Unit = Literal["parameters", "calls", "nanoseconds", "bytes"]

_STATE_BYTES = 8  # two fp32 numbers per parameter, as AdamW keeps

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a block, with a ``TensorMeta`` in place of each tensor."""

T = TypeVar("T")

_NUM_REPEATS = 5  # timed runs after a warm-up


@dataclass(frozen=True, kw_only=True)
class Loads:
    """How heavy a stage would be with some of the calls of blocks."""

    of_stage: StageLoad
    unit: Unit


def find_loads(
    blocks: Mapping[str, nn.Module], trace: Trace, config: ThreeDConfig, shape: MeshShape, device: torch.device
) -> Loads:
    """Loads by the method ``config.pipeline.partition``; by parameters if it names blocks.

    A block counts at each of its calls, but for its weights in ``"memory"``, which a stage holds once. Glue counts
    nothing. ``"time"`` and ``"memory"`` run one block of each kind on the device.

    Raises:
        PlanError: a block fails on random inputs of the example's shapes.
    """
    calls = [call.name for call in trace.block_calls]
    method = config.pipeline.partition
    if method == "uniform":
        return Loads(of_stage=additive([1] * len(calls)), unit="calls")
    if method == "time":
        times = _of_kinds(blocks, trace, lambda block, inputs: measure_time(block, inputs, device), method)
        return Loads(of_stage=additive([times[fqn] for fqn in calls]), unit="nanoseconds")
    if method == "memory":
        kept = _of_kinds(blocks, trace, lambda block, inputs: measure_activations(block, inputs, device), method)
        return Loads(of_stage=_memory([(blocks[fqn], kept[fqn]) for fqn in calls], config, shape), unit="bytes")
    return Loads(of_stage=additive([num_parameters(blocks[fqn]) for fqn in calls]), unit="parameters")


def num_parameters(block: nn.Module) -> int:
    """Elements of all parameters of a block."""
    return sum(parameter.numel() for parameter in block.parameters())


def _of_kinds(
    blocks: Mapping[str, nn.Module], trace: Trace, measure: Callable[[nn.Module, Inputs], int], method: str
) -> dict[str, int]:
    """Block FQN -> what ``measure`` says; blocks that are alike and get like inputs are measured once."""
    found: dict[Hashable, int] = {}
    measured = {}
    for fqn, inputs in trace.block_inputs.items():
        kind = (kind_of(blocks[fqn]), repr(inputs))
        if kind not in found:
            try:
                found[kind] = measure(blocks[fqn], inputs)
            except Exception as error:
                raise PlanError(
                    f"pipeline.partition='{method}' runs every kind of block on random inputs (integers are 0) of the"
                    f" example's shapes, but {fqn} failed on them ({type(error).__name__}: {error}). Use"
                    " pipeline.partition='parameters', or name the blocks with which stages begin."
                ) from error
        measured[fqn] = found[kind]
    return measured


def _memory(calls: Sequence[tuple[nn.Module, int]], config: ThreeDConfig, shape: MeshShape) -> StageLoad:
    """Bytes of the weights' state on one rank, and of the activations that a stage holds at once.

    Args:
        calls: Block and bytes of activations of each call.
    """
    num_stages = len(config.pipeline.stage_ranks(shape.pp))
    state: list[int] = []
    repeated: list[tuple[int, int, int]] = []  # (call, earlier call with the same parameter, its bytes)
    latest: dict[Tensor, int] = {}
    for call, (block, _) in enumerate(calls):
        state.append(0)
        for parameter in block.parameters():
            num_bytes = _state_bytes(parameter, zero_stage=config.zero.stage, dp=shape.dp)
            state[-1] += num_bytes
            if parameter in latest:
                repeated.append((call, latest[parameter], num_bytes))
            latest[parameter] = call
    states, activations = [0, *accumulate(state)], [0, *accumulate(kept for _, kept in calls)]

    def load(stage: int, start: int, stop: int) -> int:
        held_already = sum(size for call, earlier, size in repeated if start <= earlier and call < stop)
        in_flight = _num_in_flight(config, stage, num_stages)
        return states[stop] - states[start] - held_already + in_flight * (activations[stop] - activations[start])

    return load


def _state_bytes(parameter: Tensor, *, zero_stage: int, dp: int) -> int:
    """Bytes of a parameter, its gradient and its optimizer state on one rank, before tensor parallel."""
    weight = parameter.nbytes // (dp if zero_stage >= 3 else 1)
    if not parameter.requires_grad:
        return weight
    gradient = parameter.nbytes // (dp if zero_stage >= 2 else 1)
    return weight + gradient + parameter.numel() * _STATE_BYTES // (dp if zero_stage >= 1 else 1)


def _num_in_flight(config: ThreeDConfig, stage: int, num_stages: int) -> int:
    """Microbatches whose activations a stage holds at once: all in GPipe; in the others about as many as in 1F1B."""
    if config.pipeline.schedule == "gpipe":
        return config.num_microbatches
    return min(config.num_microbatches, num_stages - stage)


def measure_time(block: nn.Module, inputs: Inputs, device: torch.device) -> int:
    """Median time of one forward, and of the backward where autograd is on, in nanoseconds."""

    def run(forward: Callable[[], list[Tensor]]) -> int:
        durations = []
        for _ in range(1 + _NUM_REPEATS):
            _wait_for(device)
            start = time.perf_counter_ns()
            outputs = forward()
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
            _wait_for(device)
            durations.append(time.perf_counter_ns() - start)
        return round(median(durations[1:]))

    return _measured(block, inputs, device, run)


def measure_activations(block: nn.Module, inputs: Inputs, device: torch.device) -> int:
    """Bytes that autograd keeps from one forward to its backward, without the weights; each storage counts once."""

    def run(forward: Callable[[], list[Tensor]]) -> int:
        saved: dict[int, torch.UntypedStorage] = {}  # holds them, so that no id is used twice

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            saved[id(storage)] = storage
            return tensor

        weights = {id(tensor.untyped_storage()) for tensor in (*block.parameters(), *block.buffers())}
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            forward()
        return sum(storage.nbytes() for key, storage in saved.items() if key not in weights)

    return _measured(block, inputs, device, run)


def _measured(
    block: nn.Module, inputs: Inputs, device: torch.device, run: Callable[[Callable[[], list[Tensor]]], T]
) -> T:
    """Call ``run`` with the block's forward, a function that returns the outputs that require grad."""

    def call(forward: Callable[..., Any]) -> T:
        examples = tree_map(lambda leaf: _random_input(leaf, device), inputs)

        def differentiable() -> list[Tensor]:
            # Copies, because a leaf of autograd can't be changed in place.
            args, kwargs = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, examples)
            outputs = tree_leaves(forward(*args, **kwargs))
            return [leaf for leaf in outputs if isinstance(leaf, Tensor) and leaf.requires_grad]

        return run(differentiable)

    with random_states_kept(), preserved(block):
        return with_state(block, _state_on(block, device), call)


def _state_on(block: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The block's weights on the device, random where it has none yet, and copies of its buffers."""
    parameters = {
        fqn: _values(parameter, device).requires_grad_(parameter.requires_grad)
        for fqn, parameter in block.named_parameters()
    }
    return parameters | {fqn: _values(buffer, device).clone() for fqn, buffer in block.named_buffers()}


def _values(tensor: Tensor, device: torch.device) -> Tensor:
    if isinstance(tensor, DeferredTensor):
        return tensor.computed().to(device)
    return random_like(tensor, device) if tensor.is_meta else tensor.detach().to(device)


def _random_input(leaf: Any, device: torch.device) -> Any:
    """Normal numbers, booleans of either kind, and zeros, which any table of embeddings has a row for."""
    if not isinstance(leaf, TensorMeta):
        return leaf
    if leaf.dtype.is_floating_point:
        values = torch.randn(leaf.shape, device=device).to(leaf.dtype)
        return values.requires_grad_(leaf.requires_grad)
    if leaf.dtype == torch.bool:
        return torch.rand(leaf.shape, device=device) < 0.5
    return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
