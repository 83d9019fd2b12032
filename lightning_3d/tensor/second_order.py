"""Gradients of gradients, which some steps of tensor parallel do not have."""

from __future__ import annotations

import torch

from lightning_3d.errors import PlanError


def refuse_second_order(what: str) -> None:
    """In a backward that has none.

    Raises:
        PlanError: its own gradient may be asked for.
    """
    if torch.is_grad_enabled():
        raise PlanError(
            f"create_graph=True: gradients of gradients through {what} are not built for tensor parallel. Let"
            " tensor.plan replicate the block's weights, or use tensor_parallel_size=1."
        )
