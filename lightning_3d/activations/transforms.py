"""Transforms of ``torch.func`` that take gradients, which torch does not run where hooks see saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.autograd import is_refusal_of_hooks


@contextmanager
def transforms_refused(fqn: str) -> Iterator[None]:
    """Name the block that takes gradients inside by ``torch.func``.

    Raises:
        StepError: it does.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_refusal_of_hooks(error):
            raise
        raise StepError(
            f"{fqn} takes gradients by torch.func (grad, vjp, jacrev or hessian), which torch does not do in blocks"
            " that activations.recompute or activations.offload is for. Leave the block out of activations.blocks."
        ) from error
