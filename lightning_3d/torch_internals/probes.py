"""Whether torch still shows what else would go unseen without an error: custom autograd functions and checkpoints."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.autograd import checkpoints_noted
from lightning_3d.torch_internals.custom_functions import custom_functions_seen


class _Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()


def check_what_is_seen() -> None:
    """Raise where this version of torch hides a custom function, or a checkpoint, from the adapters that look for it.

    Raises:
        StepError: Steps could be traced, split and sharded wrongly, silently.
    """
    seen: list[type[torch.autograd.Function]] = []
    tensor = torch.ones(1, device="cpu")
    with custom_functions_seen(lambda cls, *_: seen.append(cls)), checkpoints_noted() as noted:
        _Probe.apply(tensor)  # type: ignore[no-untyped-call]  # torch 2.13
        checkpoint(torch.neg, tensor, use_reentrant=False, preserve_rng_state=False)
    hidden = [*(["autograd functions"] if not seen else []), *(["checkpoints"] if not noted else [])]
    if hidden:
        raise StepError(
            f"torch {torch.__version__} calls {' and '.join(hidden)} in another way than the versions that lightning_3d"
            " is tested with, so that steps would be traced wrongly. Install torch==2.15.*."
        )
