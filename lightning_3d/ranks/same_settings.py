"""The settings that every rank has to share: a rank that clips, saves or stops alone is waited for."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch.distributed as dist
from lightning.pytorch import Trainer, callbacks

from lightning_3d.config.settings import ThreeDConfig
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
    flags = {name: getattr(trainer, name, None) for name in names}
    plain = {f"Trainer({name}=...)": [str(v)] for name, v in flags.items() if isinstance(v, int | float | str | None)}
    mine = {"strategy": [str(config)], "what the Trainer runs": [str(trainer.state.fn)], "callbacks": shared} | plain
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if name := next((name for name in first if first[name] != theirs[name]), None):
            raise ConfigError(
                f"The ranks were given different settings: {name}: {_without(first[name], theirs[name])} on rank 0,"
                f" {_without(theirs[name], first[name])} on rank {rank}. Give every rank the same."
            )


def _without(lines: Sequence[str], others: Sequence[str]) -> str:
    left = [line for line in lines if line not in others]
    return ", ".join(left[:3]) + (", ..." if left[3:] else "") or "none of these"
