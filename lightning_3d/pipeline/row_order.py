"""The order of samples in tensors that have several rows of each.

    cat([view, augmented])    whole batch     a0 a1 a2 a3  b0 b1 b2 b3     two views
                              microbatches    a0 a1  b0 b1 | a2 a3  b2 b3
    x.flatten(0, 1)           whole batch     a0 a0 a1 a1 a2 a2 a3 a3      one view, two tokens of each

Shapes do not tell, but data do: in the right order the microbatches' tensors make up the whole batch's. Where there is
none, as after ``x.flip(0)`` or less the mean over the batch, the samples are coupled.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from lightning_3d.model.reals import as_reals
from lightning_3d.pipeline.loss_kind import tolerance
from lightning_3d.pipeline.microbatch_concat import MicrobatchConcat
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.zero.master_weights import is_half

_EXACT = 1e-4  # relative, in fp32: a hundredth of a sample may be mixed into another


def views_of(whole: Tensor, parts: Sequence[Tensor], shares: Sequence[float], size: int) -> int | None:
    """How many times the samples come one after the other in a tensor; None if its parts do not make it up.

    Args:
        shares: The parts' shares of the samples.
        size: Samples in the whole batch.
    """
    meta, metas = TensorMeta.of(whole), [TensorMeta.of(part) for part in parts]
    with suppress(ValueError):
        dim = MicrobatchConcat(meta, metas, shares).dim
        if dim is None:
            return 1 if all(_are_alike(part, whole) for part in parts) else None
        per_sample = max(meta.shape[dim] // size, 1)
        for repeats_per_sample in range(1, per_sample + 1):
            if per_sample % repeats_per_sample == 0 and _are_alike(
                MicrobatchConcat(meta, metas, shares, repeats_per_sample).join(parts), whole
            ):
                return repeats_per_sample
    return None


def _are_alike(found: Tensor, expected: Tensor) -> bool:
    rtol = tolerance(is_half=True) if is_half(expected) or torch.is_autocast_enabled(expected.device.type) else _EXACT
    found, expected = as_reals(found).double(), as_reals(expected).double()
    scale = expected.abs().nan_to_num(posinf=0.0).max() if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=rtol, atol=rtol * float(scale), equal_nan=True)
