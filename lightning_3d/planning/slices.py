"""The part of a traced step that ranks share out as slices of its sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lightning_3d.context.boundary import slice_between_stages
from lightning_3d.context.dims import SequenceDims
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.storages import StepStorages
from lightning_3d.trace.trace import Trace


def first_with_sequence(trace: Trace, dims: SequenceDims) -> int | None:
    """The position of the first call of a block that gets an activation with a sequence; None if none does."""
    calls = enumerate(trace.calls)
    return next((i for i, call in calls if call.is_block and sequence_of(trace, call.name, dims) is not None), None)


def sequence_of(trace: Trace, fqn: str, dims: SequenceDims) -> TensorMeta | None:
    """The first activation with a sequence among what a block gets."""
    metas = [leaf for leaf in tree_leaves(trace.block_inputs.get(fqn, ())) if isinstance(leaf, TensorMeta)]
    floating = (meta for meta in metas if meta.dtype.is_floating_point)
    return next((meta for meta in floating if dims.of(fqn, len(meta.shape)) is not None), None)


def on_slices(storages: StepStorages, first: int, size: int) -> StepStorages:
    """The storages of a step on the rank with the longest slice of `size`: what calls make from the position `first` on
    is cut, and what was there before is whole.
    """
    before, later = storages.of_calls[:first], storages.of_calls[first:]
    whole = {number for call in before for number in (*call.inputs, *call.outputs, *call.saved)}
    whole |= storages.of_calls[first].inputs
    cut = {number for call in later for number in (*call.outputs, *call.saved)} - whole
    sizes = (-(-num_bytes // size) if i in cut else num_bytes for i, num_bytes in enumerate(storages.sizes))
    return replace(storages, sizes=tuple(sizes))


def between_stages(trace: Trace, ids: Iterable[int], dims: SequenceDims, size: int) -> tuple[TensorMeta, ...]:
    """The parts of tensors, by their ids, that the rank with the longest slice of `size` sends to the next stage."""
    return tuple(slice_between_stages(trace, i, dims, size) for i in ids)
