"""Outputs of blocks by the use that a step makes of them: those that nothing reads, and logits for a loss alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_3d.trace.trace import Trace, TracedCall


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


LOSS, LOG, LOSS_OF_LOG = "cross_entropy", "log_softmax", "nll_loss"
"""Names of calls that make the loss of logits: the first, or the third of what the second gives."""

VIEWS = frozenset(
    {"__getitem__", "flatten", "permute", "reshape", "squeeze", "swapaxes", "transpose", "unsqueeze", "view"}
)
COPIES = frozenset({"clone", "contiguous"})
CASTS = frozenset({"double", "float", "to"})
ELEMENTWISE = CASTS | {"__mul__", "__rmul__", "__truediv__", "div", "mul", "tanh", "true_divide"}
"""Names of calls of single numbers, and of constants."""

_KEEPING = VIEWS | COPIES | ELEMENTWISE
"""Calls that logits go through on shards; a further use of them elsewhere gathers them once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedLogits:
    """The output of a block, as the input of a loss that runs on shards."""

    num_classes: int

    is_read: bool
    """Whether the step uses them for anything else, too: then they are gathered at once, on all ranks alike."""


def find_sharded_logits(trace: Trace) -> Mapping[str, ShardedLogits]:
    """Find blocks whose output reaches a cross entropy as logits: ``F.cross_entropy``, or ``F.nll_loss`` of their
    ``log_softmax``.

    A step that changes them or a view of them in place has none.

    Returns:
        Block FQN -> what it returns to the loss.
    """
    found: dict[str, ShardedLogits] = {}
    refused: set[str] = set()
    for position, call in enumerate(trace.calls):
        if not call.is_block:
            continue
        logits = _logits(call, trace.calls[position + 1 :], trace)
        if logits is None or found.get(call.name, logits) != logits:
            refused.add(call.name)
        else:
            found[call.name] = logits
    return {fqn: logits for fqn, logits in found.items() if fqn not in refused}


def _logits(block: TracedCall, later: tuple[TracedCall, ...], trace: Trace) -> ShardedLogits | None:
    outputs = [result.tensor for result in block.results if result.tensor is not None]
    family, logs, reaches_loss, is_read = set(outputs[:1]), set[int](), False, trace.stopped_by is not None
    for call in later:
        if not family.intersection(call.inputs):
            continue
        if call.mutated or family.intersection(call.aliased):
            return None
        if (call.name == LOSS and call.inputs[0] in family) or (call.name == LOSS_OF_LOG and call.inputs[0] in logs):
            reaches_loss = True
        elif not call.is_block and (call.name in _KEEPING or call.name == LOG):
            family.update(call.outputs)
            if call.name == LOG or logs.intersection(call.inputs):
                logs.update(call.outputs)
        else:
            is_read = True
    if not reaches_loss or not (shape := trace.tensors[outputs[0]].shape):
        return None
    return ShardedLogits(num_classes=shape[-1], is_read=is_read)
