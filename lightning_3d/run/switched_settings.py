"""Settings of an optimizer's groups that code switches in training, after which it may work in another way.

How much of a parameter an optimizer has to see was found with the settings that it had, and holds for them: where a
group gets another one that is no number (``group["ortho"] = True`` at step 1000), it is tried again.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import StepError
from lightning_3d.run.decide.unsafe_optimizers import stepping_device, steps_parts
from lightning_3d.zero.optimizer_kind import KINDS, OptimizerKind, first_states, is_known, optimizer_kind

_Settings = tuple[tuple[int, str, object], ...]
"""Number of a group, name and value of each."""


class SwitchedSettings:
    """Tries optimizers again where their settings are new.

    Args:
        kinds: As found with their present settings.
        device: Where steps of the model run.
    """

    def __init__(
        self, kinds: Mapping[Optimizer, OptimizerKind], shape: MeshShape, config: ZeroConfig, device: torch.device
    ) -> None:
        tried = [o for o in kinds if not is_known(o)] if config.optimizer_steps == "auto" else []
        self._kinds, self._shape, self._config = kinds, shape, config
        self._device = stepping_device(config, device)
        self._first = {optimizer: first_states(optimizer) for optimizer in tried}
        self._seen = {optimizer: [_settings(optimizer)] for optimizer in tried}

    def check(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer, on every rank.

        Raises:
            StepError: it has to see more of parameters now than this layout has ranks step.
        """
        seen = self._seen.get(optimizer)
        if seen is None or (settings := _settings(optimizer)) in seen:
            return
        found = optimizer_kind(optimizer, device=self._device, first=self._first[optimizer])
        new = [setting for setting in settings if setting not in seen[-1]]
        switched = ", ".join(f"param_groups[{i}][{name!r}] = {value!r}" for i, name, value in new)
        self._refuse(optimizer, found, switched)
        seen.append(settings)

    def _refuse(self, optimizer: Optimizer, found: OptimizerKind, switched: str) -> None:
        """Raise for an optimizer that has to see more of parameters than it was made to."""
        kind, shape, config = self._kinds[optimizer], self._shape, self._config
        is_apart = found == "all" and (shape.pp > 1 or config.offload_optimizer != "none")
        if KINDS.index(found) > KINDS.index(kind) and (steps_parts(shape, config) or is_apart):
            raise StepError(
                f"{type(optimizer).__name__} works on {found!r} since code set {switched}, but worked on {kind!r} when"
                " it was made, so that ranks step less of a parameter than it needs now. Set"
                f" zero.optimizer_steps={found!r} from the start, or the same in configure_optimizers."
            )


def _settings(optimizer: Optimizer) -> _Settings:
    groups = enumerate(optimizer.param_groups)
    return tuple((i, k, v) for i, group in groups for k, v in group.items() if v is None or isinstance(v, (bool, str)))
