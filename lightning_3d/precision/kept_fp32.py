"""Modules that stay in fp32 in a model of 16 bits: norms, routers, heads.

Their 16-bit inputs are cast to fp32. Where the weights of the others are 16-bit, outputs are cast to that dtype; under
autocast, which is off inside of these modules, the operators that follow cast what they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from lightning_3d.errors import ConfigError
from lightning_3d.torch_internals.pytree import tree_map_only
from lightning_3d.torch_internals.tensors import widened

_FORWARD = "forward"


class KeptInFp32:
    """The forward of a module in fp32; takes the place of ``module.forward``, and stays, like the dtype of its weights.

    Args:
        forward: The module's own.
        returned: The dtype of its outputs, if they are cast.
        autocast: The type of the device on which autocast is on outside, if it is.
    """

    def __init__(self, forward: Callable[..., object], returned: torch.dtype | None, autocast: str | None) -> None:
        self._forward, self._returned, self._autocast = forward, returned, autocast

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run it."""
        args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
        with self._without_autocast():
            output = self._forward(*args, **kwargs)
        return output if self._returned is None else tree_map_only(Tensor, self._narrowed, output)

    def _without_autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self._autocast is None else torch.autocast(self._autocast, enabled=False)

    def _narrowed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._returned) if tensor.dtype == torch.float32 else tensor


def keep_fp32(
    module: nn.Module, patterns: Sequence[str], *, returned: torch.dtype | None, autocast: str | None
) -> None:
    """Let the modules whose FQN matches a pattern compute in fp32, with all that is in them.

    Args:
        patterns: As in a shell: ``*`` and ``?``.
        returned: The dtype of their outputs; None for fp32.
        autocast: The type of the device on which autocast is on outside; None if it is off.

    Raises:
        ConfigError: a pattern matches no module, or one that shares a 16-bit parameter with another.
    """
    named = {fqn: inner for fqn, inner in module.named_modules() if fqn}
    for pattern in patterns:
        if not any(fnmatchcase(fqn, pattern) for fqn in named):
            raise ConfigError(
                f"precision.keep_fp32 has the pattern {pattern!r}, which matches no module of"
                f" {type(module).__name__}; its modules are {', '.join([*named][:8])}, ..."
            )
    matching = [fqn for fqn in named if any(fnmatchcase(fqn, pattern) for pattern in patterns)]
    if returned is not None:
        _refuse_shared(module, matching)
    for fqn in matching:
        inner = named[fqn]
        is_inside = any(fqn.startswith(f"{other}.") for other in matching)
        inner.float()
        if not is_inside and not isinstance(vars(inner).get(_FORWARD), KeptInFp32):
            vars(inner)[_FORWARD] = KeptInFp32(inner.forward, returned, autocast)


def _refuse_shared(module: nn.Module, matching: Sequence[str]) -> None:
    """Refuse parameters that would be fp32 in modules that compute in 16 bits."""
    kept: dict[nn.Parameter, str] = {}
    others: dict[nn.Parameter, str] = {}
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        is_kept = any(fqn.startswith(f"{inner}.") for inner in matching)
        (kept if is_kept else others).setdefault(parameter, fqn)
    for parameter in (p for p in kept if p in others):
        raise ConfigError(
            f"precision.keep_fp32 keeps {kept[parameter]} in fp32, which is the same parameter as {others[parameter]},"
            " of a module that computes in 16 bits. Name both modules, or none."
        )
