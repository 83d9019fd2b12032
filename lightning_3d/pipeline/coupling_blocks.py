"""Blocks that couple the samples of their batch, which with a pipeline is a microbatch.

A block with code of the user's runs alone, with random weights and inputs, on a batch and on each half of it, which
give the same only if no samples meet and none takes the room of a later one. What it gives without a dimension of
samples, as a loss of its own, counts as the mean of the microbatches'.

A block that draws would draw other numbers for halves, and of an object among its arguments (a cache, a block mask)
that of a half is not known: it runs again with the second half of the samples exchanged, which changes what the first
half gives only if samples meet. Own losses of blocks that draw are compared in evaluation mode.

Integers and masks are zero meanwhile, and a block that does not run so, or that is large, is not told of. Of BatchNorm
the plan tells.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_3d.distributed.rng import Generators
from lightning_3d.model.pytrees import as_called, is_opaque
from lightning_3d.model.reals import as_reals
from lightning_3d.pipeline.loss_kind import is_close, tolerance
from lightning_3d.pipeline.microbatch_concat import grown_dim
from lightning_3d.torch_internals.modules import BatchNorm, named_state
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten
from lightning_3d.trace.fake_blocks import RandomnessSeen, random_like, run_with_state
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.trace import Trace

_NUM_DRAWS = 3  # of weights and inputs: of positive numbers, and of samples that are apart
_MOST_BYTES = 2**30  # of a block's parameters and buffers

Dims: TypeAlias = "Mapping[int, int | None]"
"""By place among the outputs of a block the dimension of the samples; None if there is none."""


def coupling_blocks(blocks: Mapping[str, nn.Module], whole: Trace, part: Trace) -> Iterator[str]:
    """FQNs of the blocks that do.

    Args:
        whole: The trace of a batch.
        part: That of its half.
    """
    known: dict[Hashable, bool] = {}
    for call in whole.block_calls:
        if call.call_index == 0 and call.name in part.block_inputs:
            probe = _Probe(blocks[call.name], whole.block_inputs[call.name], part.block_inputs[call.name])
            if probe.kind not in known:
                new = {i: result.tensor for i, result in enumerate(call.results) if result.tensor is not None}
                known[probe.kind] = probe.couples(
                    {i: grown_dim(whole.tensors[t], part.tensors[t]) for i, t in new.items()}
                )
            if known[probe.kind]:
                yield call.name


class _Probe:
    """One block, with the arguments that it gets for a batch and for its half, tensors as metas."""

    def __init__(self, block: nn.Module, of_whole: object, of_part: object) -> None:
        self._block = block
        self._metas, self._spec = tree_flatten(of_whole)
        self._of_part = tree_leaves(of_part)
        self._state = {name: tensor for name, tensor, _ in named_state(block)}
        classes = tuple(type(module) for module in block.modules())
        shapes = tuple((name, tensor.shape) for name, tensor in self._state.items())
        self.kind: Hashable = (classes, shapes, repr(self._metas))
        """Blocks of one kind do alike."""

    @cached_property
    def _dims(self) -> list[int | None]:
        """The dimension of the samples in each argument."""
        pairs = zip(self._metas, self._of_part, strict=True)
        return [grown_dim(meta, of_part) if isinstance(meta, TensorMeta) else None for meta, of_part in pairs]

    def couples(self, dims: Dims) -> bool:
        """Whether it couples samples.

        Args:
            dims: Of the tensors that it makes, by their place among its outputs.
        """
        modules = list(self._block.modules())
        is_users = any(not type(module).__module__.startswith("torch.nn.") for module in modules)
        is_told = any(isinstance(module, BatchNorm) for module in modules)
        if (
            is_told
            or not is_users
            or sum(tensor.numel() * tensor.element_size() for tensor in self._state.values()) > _MOST_BYTES
        ):
            return False
        try:
            return any(self._runs_differ(dims, draw) for draw in range(_NUM_DRAWS))
        except Exception:
            return False

    def _runs_differ(self, dims: Dims, draw: int) -> bool:
        device = next(meta.device for meta in self._metas if isinstance(meta, TensorMeta))
        generators = Generators(device)
        with torch.no_grad(), generators.torch_seeded(draw):
            weights = {tensor: _weights_like(tensor, device) for tensor in self._state.values()}
            inputs, others = (self._inputs(are_apart=draw > 0) for _ in range(2))

        def run(given: Sequence[object]) -> list[Any]:
            state = {name: weights[tensor].clone() for name, tensor in self._state.items()}
            own = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in given]  # it may change them
            args, kwargs = as_called(tree_unflatten(own, self._spec))
            with torch.no_grad(), generators.torch_seeded(1):
                return tree_leaves(run_with_state(self._block, state, args, kwargs))

        with RandomnessSeen() as randomness:
            whole = run(inputs)
        if not all(leaf.isfinite().all() for leaf in whole if isinstance(leaf, Tensor)):
            return False  # it does not take such weights
        has_objects = any(is_opaque(leaf) for leaf in self._metas if not isinstance(leaf, TensorMeta))
        if not randomness.seen and not has_objects:
            return _are_others(whole, run(self._half(inputs, 0)), run(self._half(inputs, 1)), dims)
        mixed = run(self._with_other_half(inputs, others))
        pairs = [[_half_of(run[i], dim, 0) for run in (whole, mixed)] for i, dim in dims.items() if dim is not None]
        if not all(_are_alike(*pair) for pair in pairs):
            return True
        of_batch = {i: None for i, dim in dims.items() if dim is None and whole[i].is_floating_point()}
        if not of_batch or has_objects:
            return False
        with _evaluated(self._block):
            return _are_others(run(inputs), run(self._half(inputs, 0)), run(self._half(inputs, 1)), of_batch)

    def _inputs(self, *, are_apart: bool) -> list[object]:
        """Random arguments.

        Args:
            are_apart: Whether samples have different means, so that routers send most of one to few experts; else all
                numbers are positive, as some blocks want.
        """
        inputs = list[object]()
        for meta, dim in zip(self._metas, self._dims, strict=True):
            drawn = meta.random() if isinstance(meta, TensorMeta) else meta
            if are_apart and dim is not None and isinstance(drawn, Tensor) and drawn.is_floating_point():
                means = [size if d in (dim, drawn.dim() - 1) else 1 for d, size in enumerate(drawn.shape)]
                drawn = drawn - 0.5 + torch.randn(means, dtype=drawn.dtype, device=drawn.device)
            inputs.append(drawn)
        return inputs

    def _half(self, inputs: Sequence[object], index: int) -> list[object]:
        """The samples of the first half of these, or of the second."""
        given: list[object] = []
        for leaf, of_part, dim in zip(inputs, self._of_part, self._dims, strict=True):
            own = leaf if isinstance(leaf, Tensor) else of_part
            given.append(own if dim is None else _half_of(own, dim, index))
        return given

    def _with_other_half(self, inputs: Sequence[Any], others: Sequence[Any]) -> list[object]:
        """These, where the second half of the samples are others."""
        mixed = []
        for leaf, other, dim in zip(inputs, others, self._dims, strict=True):
            if dim is not None:
                size = leaf.shape[dim] // 2
                leaf = torch.cat([leaf.narrow(dim, 0, size), other.narrow(dim, size, leaf.shape[dim] - size)], dim)
            mixed.append(leaf)
        return mixed


def _weights_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Matrices as layers begin with, so that softmaxes and the like are far from linear; positive vectors."""
    if tensor.ndim < 2 or not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
        return random_like(tensor, device)
    drawn = torch.randn(tensor.shape, dtype=tensor.dtype, device=device)
    return drawn.mul_(tensor.shape[-1] ** -0.5)


@contextmanager
def _evaluated(block: nn.Module) -> Iterator[None]:
    """Have a block in evaluation mode inside."""
    modes = {module: module.training for module in block.modules()}
    block.eval()
    try:
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training


def _half_of(tensor: Tensor, dim: int, index: int) -> Tensor:
    """The samples of the first half, or of the second."""
    size = tensor.shape[dim] // 2
    return tensor.narrow(dim, index * size, size)


def _are_others(whole: Sequence[Any], first: Sequence[Any], second: Sequence[Any], dims: Dims) -> bool:
    """Whether halves of a batch give other samples, or losses whose mean is another, than the batch does."""
    for i, dim in dims.items():
        halves = first[i], second[i]
        if dim is not None:
            if any(not _are_alike(_half_of(whole[i], dim, index), half) for index, half in enumerate(halves)):
                return True
        elif whole[i].is_floating_point() and not _are_alike(whole[i], sum(halves) / 2):
            return True
    return False


def _are_alike(first: Tensor, second: Tensor) -> bool:
    first, second = as_reals(first), as_reals(second)
    return is_close(first.double(), second.double(), tolerance(is_half=first.dtype.itemsize < 4))
