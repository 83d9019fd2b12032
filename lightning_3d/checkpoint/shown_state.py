"""The state of a model as hooks that save a checkpoint see it: under the names of one process, on every rank.

In place of what this rank does not save there are stand-ins, which have shapes alone. So a hook that drops, renames or
adds entries does so on all ranks alike, and one that needs the values of a stand-in raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_3d.checkpoint.own_state import held_names, like_state, state_of
from lightning_3d.model.absent import stand_in
from lightning_3d.torch_internals.lightning_helpers import callbacks_of


def hooks_see_saving(trainer: Trainer, module: LightningModule) -> bool:
    """Whether code that is not Lightning's gets the checkpoints that are saved."""
    hooks = [module.on_save_checkpoint, *(callback.on_save_checkpoint for callback in callbacks_of(trainer))]
    return any(not (getattr(hook, "__module__", None) or "").startswith("lightning.pytorch.") for hook in hooks)


def shown_parts(module: nn.Module) -> dict[str, Any]:
    """This rank's parts, for a folder: tensors are aliases of the parameters, in the order that the ranks keep."""
    state = state_of(module)
    held = held_names(state)
    own = {fqn: value for fqn, value in state.items() if fqn in held}
    return _shown(own, state, module, "lies on another pipeline stage, which saves it")


def shown_whole(module: nn.Module, whole: Mapping[str, Any]) -> dict[str, Any]:
    """The whole state for a file, which rank 0 writes; ``whole`` may be empty on the other ranks."""
    return _shown(whole, state_of(module), module, "was gathered on rank 0, which saves it")


def _shown(own: Mapping[str, Any], state: dict[str, Any], module: nn.Module, place: str) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for fqn, value in state.items():
        if fqn in own:
            shown[fqn] = own[fqn]
        elif isinstance(value, Tensor):
            shown[fqn] = stand_in(value, f"checkpoint['state_dict'][{fqn!r}]", module, place)
    return like_state(state, shown)
