"""Heads whose logits go to a cross entropy and nowhere else, as they run with it in chunks of rows."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.config.activations import Mode
from lightning_3d.planning.memory.stage_memory import FusedLoss
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.tensor.vocabulary.chunked_loss import chunk_length
from lightning_3d.trace.storages import StepStorages

_WIDE = 4  # bytes of a number of fp32, in which gradients of weights add up


def fused_losses(
    flow: StageFlow, storages: StepStorages, heads: Mapping[str, int], modes: Mapping[str, Mode]
) -> list[FusedLoss]:
    """Find them in a trace.

    Args:
        heads: FQN of a linear layer that is a block -> its number of classes.
        modes: Block FQN -> how it is recomputed, which leaves a head alone.
    """
    found = []
    calls = flow.trace.calls
    for position, call in enumerate(calls):
        if not call.is_block or call.name not in heads or modes.get(call.name, "none") != "none":
            continue
        logits = storages.of_calls[position].outputs
        readers = [i for i in range(position + 1, len(calls)) if storages.of_calls[i].inputs & logits]
        if not readers or calls[readers[-1]].name != "cross_entropy":
            continue
        if any(storages.of_calls[i].outputs - logits for i in readers[:-1]):  # more than views
            continue
        (meta,) = (flow.trace.tensors[i] for i in call.outputs)
        num_classes, num_rows = heads[call.name], meta.num_bytes // meta.dtype.itemsize // heads[call.name]
        rows = storages.num_bytes(storages.of_calls[position].inputs)
        width = rows // max(num_rows, 1) // meta.dtype.itemsize
        weight = num_classes * width * _WIDE
        chunk = min(chunk_length(num_rows, num_classes), num_rows) * num_classes * _WIDE
        found.append(FusedLoss(head=position, loss=readers[-1], logits=3 * chunk, rows=rows, weight=weight))
    return found
