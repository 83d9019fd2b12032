"""Tensors that couple samples before blocks get them, such as inputs that are normalised by the batch.

Each microbatch computes its own, so that they differ from those of one process, where no weight of a loss mends it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_3d.pipeline.joints import Joint
from lightning_3d.trace.ghost import TensorMeta

Fed = Sequence[tuple[str, Tensor]]
"""FQN of a block and a floating-point tensor of the batch alone that it got, for each."""

_RTOL = 1e-3  # of the greatest value


def coupled_inputs(whole: Fed, parts: Sequence[Fed]) -> tuple[str, ...]:
    """FQNs of blocks that get other numbers for the parts of a batch than for the whole.

    Shapes that depend on data tell nothing.
    """
    columns = zip(whole, *parts, strict=False)
    coupled = [fqn for (fqn, tensor), *of_parts in columns if _is_coupled(tensor, [part for _, part in of_parts])]
    return tuple(dict.fromkeys(coupled))


def _is_coupled(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    try:
        joint = Joint(TensorMeta.of(whole), [TensorMeta.of(part) for part in parts], [1 / len(parts)] * len(parts))
    except ValueError:
        return False
    if joint.dim is None:
        return not all(_are_close(part, whole) for part in parts)
    # Several rows of each sample may come in another order.
    return not _are_close(torch.cat(list(parts), joint.dim).sort(joint.dim).values, whole.sort(joint.dim).values)


def _are_close(found: Tensor, expected: Tensor) -> bool:
    atol = _RTOL * float(expected.nan_to_num().abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0.0, atol=atol, equal_nan=True)
