"""Optimizers that were made before the model was made parallel, as LightningCLI makes those of its configuration.

They hold parameters that are the module's no longer, but have done nothing yet: those of the same names take their
place.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer


class EarlyParameters:
    """The names of a model's parameters from before it was made parallel; keeps none of them."""

    def __init__(self, module: nn.Module) -> None:
        self._known = {id(p): (weakref.ref(p), fqn) for fqn, p in module.named_parameters()}

    def __getstate__(self) -> dict[str, Any]:
        """A copy, or a pickle of the Trainer's, knows no names: its parameters are others."""
        return {"_known": {}}

    def replace(self, optimizers: Sequence[Optimizer], module: nn.Module) -> None:
        """Let optimizers without states hold the parameters that the module has now."""
        held = set(module.parameters())
        now = dict(module.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:
            for group in [] if optimizer.state else optimizer.param_groups:
                group["params"] = [p if p in held else now.get(self._name(p), p) for p in group["params"]]

    def _name(self, parameter: Tensor) -> str:
        reference, fqn = self._known.get(id(parameter), (None, ""))
        return fqn if reference is not None and reference() is parameter else ""
