"""Finding outputs of blocks that a step does not read, in its trace: they need not be gathered."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.trace.trace import Trace


def unread_outputs(trace: Trace) -> Mapping[str, frozenset[int]]:
    """Find outputs such as attention weights that a block returns and nothing uses.

    Returns:
        Block FQN -> leaves of its return value, by position, that no call of it has read; blocks without are absent.
    """
    if trace.stopped_by is not None:
        return {}
    read = {*trace.returned}.union(*({*call.inputs, *call.aliased} for call in trace.calls))
    found: dict[str, frozenset[int]] = {}
    for call in trace.block_calls:
        copied = {result.result for result in call.results}
        unread = frozenset(
            position
            for position, result in enumerate(call.results)
            if result.tensor is not None and result.tensor not in read and position not in copied
        )
        found[call.name] = found.get(call.name, unread) & unread
    return {fqn: unread for fqn, unread in found.items() if unread}
