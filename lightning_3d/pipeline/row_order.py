"""The order of samples in what the code after the blocks gets, where that has several rows of each.

    cat([view, augmented])    whole batch     a0 a1 a2 a3  b0 b1 b2 b3     two views
                              microbatches    a0 a1  b0 b1 | a2 a3  b2 b3
    x.flatten(0, 1)           whole batch     a0 a0 a1 a1 a2 a2 a3 a3      one view, two tokens of each

Shapes do not tell. What blocks are given by the batch alone has data, and the whole batch's is compared with that of
its microbatches; from there the trace is followed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.reals import as_reals
from lightning_3d.pipeline.denominators import TAIL
from lightning_3d.pipeline.joints import Joint, check_same_calls, grown_dim
from lightning_3d.pipeline.stage_run import Draw, StageRun
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import TracedCall

_JOINING = frozenset({"cat", "concat", "concatenate", "vstack"})
_REPEATING = frozenset({"repeat", "tile"})
_FLATTENING = frozenset({"flatten", "repeat_interleave", "reshape", "view"})

Given = Sequence[Sequence[Tensor]]
"""By call of the trace: the tensors that it gets besides those of blocks."""


class GivenTail(StageRun):
    """Runs the code before the tail without blocks, and notes what is given to them by the batch alone."""

    has_replicas = False

    def __init__(self, router: Router, flow: StageFlow, draw: Draw) -> None:
        super().__init__(router, flow, 0, (), lambda _: nullcontext(), draw)
        self.given: list[list[Tensor]] = []

    @override
    def _execute(self, call: TracedCall, leaves: list[Any], run: Any) -> Any:
        self.given.append([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf not in self._ids])
        self._made.update((i, torch.empty(0)) for i in call.outputs if i in self._to_send)
        return self._skip(call, leaves)


@dataclass(frozen=True)
class _Rows:
    """How the samples lie in a tensor that has rows of each."""

    number: int
    dim: int
    views: int | None
    """None if that is not known."""


def views_of(
    whole: StageFlow, parts: Sequence[StageFlow], given: Sequence[Given], shares: Sequence[float], size: int
) -> list[int]:
    """The numbers of views in each tensor that the code after the blocks gets.

    Args:
        given: What ``GivenTail`` noted for the whole batch, then for each part.
        size: Samples in the whole batch.

    Raises:
        StepError: they can't be told.
    """
    check_same_calls(whole, parts)
    known: dict[int, _Rows] = {}
    calls = [call for call, stage in zip(whole.trace.calls, whole.call_stages, strict=True) if stage != TAIL]
    for call, of_whole, *of_parts in zip(calls, *given, strict=False):
        of_batch = [
            _of_batch(*tensors, shares, size) for tensors in zip(of_whole, zip(*of_parts, strict=True), strict=True)
        ]
        inputs = [known[i] for i in call.inputs if i in known] + [rows for rows in of_batch if rows is not None]
        for i in call.outputs:
            meta = whole.trace.tensors[i]
            if (dim := grown_dim(meta, parts[0].trace.tensors[i])) is not None:
                known[i] = _Rows(meta.shape[dim], dim, _views(call, inputs, meta.shape[dim], dim, size))
    found = [known[i].views if i in known else 1 for i in whole.received(TAIL)]
    if None in found:
        shape = whole.trace.tensors[whole.received(TAIL)[found.index(None)]].shape
        raise StepError(
            f"The code before or between the blocks gives a tensor of shape {shape}, several rows of each sample, in an"
            " order, or with random numbers, that those of the microbatches do not make up, and the loss couples"
            " samples. Concatenate views of the batch one after the other, or set pipeline.loss='mean'."
        )
    return [views for views in found if views is not None]


def _of_batch(whole: Tensor, parts: Sequence[Tensor], shares: Sequence[float], size: int) -> _Rows | None:
    """How the samples lie in a tensor made of the batch alone; None if that is not seen."""
    meta, metas = TensorMeta.of(whole), [TensorMeta.of(part) for part in parts]
    dim = grown_dim(meta, metas[0])
    if dim is None or whole.is_meta:
        return None
    per_sample = meta.shape[dim] // size
    for views in range(1, per_sample + 1):
        with suppress(ValueError):
            if per_sample % views == 0 and _are_alike(Joint(meta, metas, shares, views).join(parts), whole):
                return _Rows(meta.shape[dim], dim, views)
    return None


def _are_alike(joined: Tensor, whole: Tensor) -> bool:
    found, expected = as_reals(joined).double(), as_reals(whole).double()
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6, equal_nan=True)


def _views(call: TracedCall, inputs: Sequence[_Rows], number: int, dim: int, size: int) -> int | None:
    """The number of views in a tensor with this number of rows that a call makes; None if that can't be told."""
    per_sample, views = number // size, [rows.views for rows in inputs if rows.views is not None]
    if per_sample <= 1:
        return 1
    if not views or len(views) < len(inputs):
        return None
    most = max(rows.number for rows in inputs)
    found = None
    if call.name in _JOINING and sum(rows.number for rows in inputs) == number:
        found = sum(views)
    elif max(views) * size == most and (call.name in _REPEATING or number <= most):
        found = per_sample
    elif call.is_block or number == most or (call.name in _FLATTENING and inputs[0].dim == dim):
        found = max(views)
    return found if found and per_sample % found == 0 else None
