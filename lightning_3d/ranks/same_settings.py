"""The settings that every rank has to share: a rank that clips, saves or stops alone is waited for."""

from __future__ import annotations

import inspect

from lightning.pytorch import Trainer, callbacks

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import gather_objects
from lightning_3d.errors import ConfigError
from lightning_3d.torch_internals.lightning_helpers import callbacks_of

_OF_ALL_RANKS = (
    callbacks.BaseFinetuning,
    callbacks.Checkpoint,
    callbacks.EarlyStopping,
    callbacks.GradientAccumulationScheduler,
    callbacks.LearningRateFinder,
    callbacks.ModelPruning,
    callbacks.StochasticWeightAveraging,
    callbacks.Timer,
    callbacks.WeightAveraging,
)
"""Callbacks that change training, or run collectives. Others may be on some ranks only, such as a progress bar."""

_OF_EACH_RANK = {"logger", "default_root_dir", "log_every_n_steps"}
"""Settings of the Trainer that may differ."""


def check_same_settings(trainer: Trainer, config: ThreeDConfig) -> None:
    """Check that all ranks have the same settings, before hooks rely on it; every rank calls it.

    Raises:
        ConfigError: names the setting, what differs and the ranks; on all ranks.
    """
    shared = [callback.state_key for callback in callbacks_of(trainer) if isinstance(callback, _OF_ALL_RANKS)]
    names = [name for name in inspect.signature(Trainer).parameters if name not in _OF_EACH_RANK]
    flags = {f"Trainer({name}=...)": getattr(trainer, name, None) for name in names}
    mine = {"strategy": str(config), "what the Trainer runs": str(trainer.state.fn)}
    mine |= {"callbacks": ", ".join(shared) or "none of these"}
    mine |= {name: str(value) for name, value in flags.items() if isinstance(value, int | float | str | None)}
    everyone = gather_objects(mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if name := next((name for name in first if first[name] != theirs.get(name)), None):
            raise ConfigError(
                f"The ranks were given different settings: {name}: {first[name]} on rank 0, {theirs.get(name)} on rank"
                f" {rank}. Give every rank the same."
            )
