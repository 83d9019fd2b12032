"""Heads whose logits go to a cross entropy and nowhere else, as they run with it in chunks of rows."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_3d.config.activations import Mode
from lightning_3d.planning.memory.stage_memory import FusedLoss
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.tensor.vocabulary.chunked_loss import chunk_length
from lightning_3d.trace.output_uses import LOG, LOSS, LOSS_OF_LOG
from lightning_3d.trace.storages import StepStorages

_WIDE = 4  # bytes of a number of fp32, in which gradients of weights add up


def fused_losses(
    flow: StageFlow, storages: StepStorages, heads: Mapping[int, int], modes: Mapping[str, Mode]
) -> list[FusedLoss]:
    """Find them in a trace.

    Args:
        heads: Position of a call that makes logits -> their number of classes.
        modes: Block FQN -> how it is recomputed, which leaves a head alone.
    """
    found = []
    calls = flow.trace.calls
    for position, num_classes in heads.items():
        if modes.get(calls[position].name, "none") != "none":
            continue
        if (way := _way_to_loss(position, flow, storages)) is None:
            continue
        loss, made = way
        (meta,) = (flow.trace.tensors[i] for i in calls[position].outputs)
        num_rows = meta.num_bytes // meta.dtype.itemsize // num_classes
        rows = storages.num_bytes(storages.of_calls[position].inputs)
        width = rows // max(num_rows, 1) // meta.dtype.itemsize
        weight = num_classes * width * _WIDE
        length = chunk_length(num_rows, num_classes, meta.device.type)
        chunk = min(length, num_rows) * num_classes * _WIDE
        found.append(FusedLoss(head=position, loss=loss, made=made, logits=3 * chunk, rows=rows, weight=weight))
    return found


def _way_to_loss(head: int, flow: StageFlow, storages: StepStorages) -> tuple[int, frozenset[int]] | None:
    """The position of the one loss of a head's logits, and the storages of these and of logarithms made of them."""
    family, logs, loss = storages.of_calls[head].outputs, frozenset[int](), None
    for i in range(head + 1, len(flow.trace.calls)):
        name, own = flow.trace.calls[i].name, storages.of_calls[i]
        if not own.inputs & family:
            continue
        if loss is not None:
            return None
        if name == LOSS or (name == LOSS_OF_LOG and own.inputs & logs):
            loss = i
        elif name == LOG:
            family, logs = family | own.outputs, logs | own.outputs
        elif own.outputs - family:  # more than views
            return None
    return None if loss is None else (loss, family)
