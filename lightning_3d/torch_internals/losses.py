"""torch's `l1_loss` drops its weights wherever a mode or a subclass of tensors sees it, as also under ``torch.device``.

Steps run in such modes, so that without this a weighted loss would be another one than in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from inspect import signature
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from lightning_3d.torch_internals.function_calls import calls_answered

_SIGNATURE = signature(F.l1_loss)


def weights_shown() -> AbstractContextManager[None]:
    """Inside, modes and subclasses get the weights of `l1_loss`."""
    return calls_answered([F.l1_loss], _with_weights)


def _with_weights(_: str, original: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    given = _SIGNATURE.bind(*args, **kwargs).arguments
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    if has_torch_function(tensors):
        return handle_torch_function(F.l1_loss, tensors, *args, **kwargs)
    return original(*args, **kwargs)
