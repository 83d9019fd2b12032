"""Transforms of ``torch.func``: torch takes no gradients by them where hooks see saved tensors, and a backward can't
compute again what ran inside of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.autograd import is_refusal_of_hooks
from lightning_3d.torch_internals.tensors import are_transforms_active


@contextmanager
def transforms_refused(fqn: str) -> Iterator[None]:
    """Name the block that takes gradients inside by ``torch.func``, or is called inside of a transform.

    Raises:
        StepError: it does, or is.
    """
    if are_transforms_active():
        raise StepError(
            f"{fqn} is called inside of a transform of torch.func (vmap, grad, vjp, jvp), which has ended when the"
            " backward needs what activations.recompute or activations.offload is to bring back. Leave the block out of"
            " activations.blocks."
        )
    try:
        yield
    except RuntimeError as error:
        if not is_refusal_of_hooks(error):
            raise
        raise StepError(
            f"{fqn} takes gradients by torch.func (grad, vjp, jacrev or hessian), which torch does not do in blocks"
            " that activations.recompute or activations.offload is for. Leave the block out of activations.blocks."
        ) from error
