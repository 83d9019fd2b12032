"""The storages of a step as one tensor-parallel rank has them: a trace is of whole blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_3d.planning.memory.block_memory import BlockMemory
from lightning_3d.planning.memory.block_run import KeptStorages
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.storages import StepStorages
from lightning_3d.trace.trace import Trace, TracedCall


def as_one_rank_keeps(trace: Trace, storages: StepStorages, blocks: Mapping[int, BlockMemory]) -> StepStorages:
    """Put the storages that one rank keeps for calls of blocks in place of those that the trace saw.

    Args:
        storages: Of the trace.
        blocks: Position of a block's call -> what it takes.
    """
    sizes, calls = list(storages.sizes), list(storages.of_calls)
    for position, memory in blocks.items():
        if memory.kept is None:
            continue
        numbers = {len(sizes) + i: storage for i, storage in enumerate(memory.kept.inner)}
        sizes += [storage.num_bytes for storage in memory.kept.inner]
        calls[position] = replace(
            calls[position],
            saved=_of_trace(trace, storages, trace.calls[position], memory.kept)
            | {number for number, storage in numbers.items() if storage.is_saved},
            casts=frozenset(number for number, storage in numbers.items() if storage.is_cast),
            costly=frozenset(number for number, storage in numbers.items() if storage.is_costly),
        )
    return replace(storages, sizes=tuple(sizes), of_calls=tuple(calls))


def _of_trace(trace: Trace, storages: StepStorages, call: TracedCall, kept: KeptStorages) -> frozenset[int]:
    """The inputs and outputs that are kept; inputs are told apart by what they are like."""
    arguments = tree_leaves(trace.block_inputs[call.name])
    alike = [arguments[i] for i in kept.inputs]
    tensors = [i for i in call.inputs if trace.tensors[i] in alike]
    tensors += [
        result.tensor for i, result in enumerate(call.results) if i in kept.outputs and result.tensor is not None
    ]
    return frozenset(storages.of_tensors[i] for i in tensors if i in storages.of_tensors)
