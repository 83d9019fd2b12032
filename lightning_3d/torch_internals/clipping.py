"""The steps of torch's clipping of gradients: their total norm, scaling them, and grouping those that are clamped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import utils
from torch.nn.utils import clip_grad

from lightning_3d.torch_internals.patches import replaced

TotalNorm = Callable[..., Tensor]
"""(gradients, norm_type, error_if_nonfinite, foreach) -> their norm."""

Scale = Callable[..., None]
"""(parameters, max_norm, total_norm, foreach): scale their gradients."""

_NORM, _SCALE, _GROUP = "_get_total_norm", "_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype"


@contextmanager
def clipping_replaced(replace_norm: Callable[[TotalNorm], TotalNorm], scale: Scale) -> Iterator[None]:
    """Let ``clip_grad_norm_`` and its public parts take other steps, and ``clip_grad_value_`` clamp what a rank holds.

    Args:
        replace_norm: Makes the new norm of torch's.
    """
    torchs, group = attrgetter(_NORM, _GROUP)(clip_grad)

    def norm_of_torch(*args: object, **kwargs: object) -> Tensor:
        with replaced("clipping", clip_grad, {_GROUP: group}):
            norm: Tensor = torchs(*args, **kwargs)
            return norm

    def grouped(lists: Sequence[Sequence[Tensor]]) -> object:
        local = [[t.to_local() if isinstance(t, DTensor) else t for t in tensors] for tensors in lists]
        return group(local) if local[0] else {}

    public = {_NORM: replace_norm(norm_of_torch), _SCALE: scale}
    private = {**public, _GROUP: grouped}
    with (
        replaced("clipping", clip_grad, private),
        replaced("clipping", utils, {name.removeprefix("_"): function for name, function in public.items()}),
    ):
        yield
