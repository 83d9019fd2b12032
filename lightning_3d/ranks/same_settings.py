"""The settings that every rank has to share: a rank that clips, saves or stops alone is waited for."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, callbacks
from torch.optim import Optimizer

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import gather_numbers
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
    """Check that all ranks have the same settings, before hooks rely on it.

    Raises:
        ConfigError: as ``check_same``.
    """
    shared = [callback.state_key for callback in callbacks_of(trainer) if isinstance(callback, _OF_ALL_RANKS)]
    names = [name for name in inspect.signature(Trainer).parameters if name not in _OF_EACH_RANK]
    flags = {name: getattr(trainer, name, None) for name in names}
    plain = {f"Trainer({name}=...)": [str(v)] for name, v in flags.items() if isinstance(v, int | float | str | None)}
    check_same(
        {"strategy": [str(config)], "what the Trainer runs": [str(trainer.state.fn)], "callbacks": shared} | plain
    )


def check_same_training(module: LightningModule) -> None:
    """Check that all ranks train the same parameters in the same way, as hooks have left them.

    Raises:
        ConfigError: as ``check_same``.
    """
    frozen = [fqn for fqn, parameter in module.named_parameters() if not parameter.requires_grad]
    check_same({"frozen parameters": frozen, "automatic_optimization": [str(module.automatic_optimization)]})


def check_same_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check that all ranks step in the same way.

    Raises:
        ConfigError: as ``check_same``.
    """
    groups = [
        f"{type(optimizer).__name__}, group {index} of {len(optimizer.param_groups)}: {_settings(group)}"
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
    ]
    check_same({"optimizers": groups})


def _settings(group: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in group.items() if isinstance(value, int | float | str | tuple))


def check_same(mine: Mapping[str, Sequence[str]]) -> None:
    """Compare settings (name -> lines) over all ranks; every rank calls it.

    Raises:
        ConfigError: names the setting, the lines that differ and the ranks; on all ranks.
    """
    sums = gather_numbers(zlib.crc32(json.dumps(mine).encode()))
    other = next((rank for rank, value in enumerate(sums) if value != sums[0]), None)
    if other is None:
        return
    everyone: list[Mapping[str, Sequence[str]]] = [{} for _ in sums]
    dist.all_gather_object(everyone, mine)
    first, second = everyone[0], everyone[other]
    name = next(name for name in first if first[name] != second[name])
    raise ConfigError(
        f"The ranks were given different settings: {name}: {_without(first[name], second[name])} on rank 0,"
        f" {_without(second[name], first[name])} on rank {other}. Give every rank the same."
    )


def _without(lines: Sequence[str], others: Sequence[str]) -> str:
    left = [line for line in lines if line not in others]
    return ", ".join(left[:3]) + (", ..." if left[3:] else "") or "none of these"
