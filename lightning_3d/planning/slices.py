"""The part of a traced step that ranks share out as slices of its sequences."""

from __future__ import annotations

from dataclasses import replace

from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.storages import StepStorages
from lightning_3d.trace.trace import Trace


def first_with_sequence(trace: Trace) -> int | None:
    """The position of the first call of a block that gets an activation (B, T, D), which is cut; None if none does."""
    positions = (i for i, call in enumerate(trace.calls) if call.is_block and sequence_of(trace, call.name) is not None)
    return next(positions, None)


def sequence_of(trace: Trace, fqn: str) -> TensorMeta | None:
    """The first activation (B, T, D) among what a block gets."""
    leaves = tree_leaves(trace.block_inputs.get(fqn, ()))
    return next((leaf for leaf in leaves if isinstance(leaf, TensorMeta) and _is_sequence(leaf)), None)


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


def _is_sequence(meta: TensorMeta) -> bool:
    return meta.dtype.is_floating_point and len(meta.shape) == 3
