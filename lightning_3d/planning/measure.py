"""Measuring a block on random inputs: how long it takes, and how many bytes it keeps for its backward.

The block's own forward runs with its weights on the given device, in the ambient autograd and autocast modes. Nothing
of it stays: no gradient, no changed buffer or attribute, no random number drawn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from lightning_3d.model.deferred import DeferredTensor
from lightning_3d.model.snapshot import preserved
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.trace.fake_blocks import random_like, with_state
from lightning_3d.trace.ghost import TensorMeta

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keyword arguments of a block, with a ``TensorMeta`` in place of each tensor."""

T = TypeVar("T")

_NUM_REPEATS = 5  # timed runs after a warm-up


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

    with isolate_rng(), preserved(block):
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
