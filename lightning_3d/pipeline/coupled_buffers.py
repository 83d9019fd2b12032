"""Buffers that a step changes by its batch and reads again before a block, such as a running mean between blocks.

Each microbatch begins with the buffer of before the step and changes it by its own samples, so that blocks after it get
other numbers than in one process. At the end of the step the changes are joined; what the code after the blocks reads
is studied with the loss.
"""

from __future__ import annotations

from lightning_3d.trace.trace import Trace


def coupled_buffers(trace: Trace) -> tuple[str, ...]:
    """FQNs of these buffers, in the order in which blocks get what comes of them."""
    of_tensors: dict[int, frozenset[str]] = {}
    found: dict[str, None] = {}
    for call in trace.calls:
        read = call.changed_buffers.union(*(of_tensors.get(i, frozenset()) for i in call.inputs))
        if call.is_block:
            found |= dict.fromkeys(sorted(read))
        else:
            of_tensors |= dict.fromkeys(call.outputs, read)
    return tuple(found)
