"""torch's ``clip_grad_norm_`` in user code, where each rank holds a part of the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.clipping import TotalNorm, clipping_replaced
from lightning_3d.zero.engine import Zero

Norm = Callable[[Iterable[nn.Parameter], float], Tensor]
"""(parameters, type of the norm) -> the norm of their gradients over all ranks; every rank calls it."""


@contextmanager
def clipping_joined(module: nn.Module, zero: Zero, norm: Norm) -> Iterator[None]:
    """Let torch's norm of gradients, and clipping by it, be those of one process; every rank calls them.

    Gradients of anything but the module are torch's business.
    """

    def replace_norm(total_norm: TotalNorm) -> TotalNorm:
        def joined(
            tensors: Tensor | Iterable[Tensor], norm_type: float = 2.0, *args: object, **kwargs: object
        ) -> Tensor:
            gradients = [tensors] if isinstance(tensors, Tensor) else list(tensors)
            owners = {id(p.grad): p for p in module.parameters() if p.grad is not None}
            own = [owners[id(gradient)] for gradient in gradients if id(gradient) in owners]
            if gradients and not own:
                return total_norm(gradients, norm_type, *args, **kwargs)
            if len(own) < len(gradients):
                raise StepError(
                    f"The norm of {len(gradients)} tensors was asked for, of which {len(own)} are gradients of"
                    f" {type(module).__name__}'s parameters, which lie in parts on several ranks. Take the norm of the"
                    " others apart."
                )
            return total_norm([norm(own, norm_type)], norm_type, *args, **kwargs)  # checks that it is finite

        return joined

    def scale(
        parameters: Tensor | Iterable[Tensor], max_norm: float, total_norm: Tensor, *_: object, **__: object
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        own = [parameter for parameter in given if parameter in zero.shards]
        others = [p.grad for p in given if p not in zero.shards and p.grad is not None]
        factor = (max_norm / (total_norm + 1e-6)).clamp(max=1.0)
        for gradient in [*zero.held_gradients(p for p in own if isinstance(p, nn.Parameter)), *others]:
            gradient.mul_(factor.to(gradient.device))

    with clipping_replaced(replace_norm, scale):
        yield
