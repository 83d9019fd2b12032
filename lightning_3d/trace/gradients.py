"""The gradients that glue takes inside of a step: ``torch.autograd.grad``, ``backward``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DIFFERENTIATING = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})


@dataclass(frozen=True, kw_only=True)
class TracedGradient:
    """A gradient of tensors of blocks that glue asks for."""

    name: str
    where: str
    """File, line and function of the user's code."""
    outputs: tuple[int, ...]
    """Ids of the tensors that it differentiates."""
    inputs: tuple[int, ...]
    """Ids of the tensors that it differentiates with respect to."""
    parameters: frozenset[str]
    """FQNs, by all names, of the parameters that it differentiates with respect to."""
    to_others: bool
    """Whether it also goes to tensors of which the trace knows no uses: of the batch, or all leaves of the graph."""
