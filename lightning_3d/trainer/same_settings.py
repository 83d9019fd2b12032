"""The settings that every rank has to share, compared once: a rank that clips, saves or stops alone is waited for."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from torch.optim import Optimizer

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import ConfigError
from lightning_3d.torch_internals.lightning_helpers import callbacks_of

_OF_ALL_RANKS = (
    BaseFinetuning,
    Checkpoint,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
"""Callbacks that change training, or run collectives. Others may be on some ranks only, such as a progress bar."""

_FLAGS = (
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "max_epochs",
    "min_epochs",
    "max_steps",
    "min_steps",
    "max_time",
    "check_val_every_n_epoch",
    "val_check_interval",
    "num_sanity_val_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "reload_dataloaders_every_n_epochs",
)


def check_same_settings(trainer: Trainer, config: ThreeDConfig) -> None:
    """Check that all ranks have the same settings, before hooks rely on it. Every rank calls it.

    Raises:
        ConfigError: names the setting, its values and the ranks; on all ranks.
    """
    callbacks = [callback for callback in callbacks_of(trainer) if isinstance(callback, _OF_ALL_RANKS)]
    settings = {
        "strategy": str(config),
        "what the Trainer runs": str(trainer.state.fn),
        "callbacks": _listed([callback.state_key for callback in callbacks]),
    }
    flags: Mapping[str, object] = {name: getattr(trainer, name, None) for name in _FLAGS}
    _compare(settings | {f"Trainer({name}=...)": str(value) for name, value in flags.items()})


def check_same_training(module: LightningModule) -> None:
    """Check that all ranks train the same parameters in the same way, as hooks have left them. Every rank calls it.

    Raises:
        ConfigError: as ``check_same_settings``.
    """
    frozen = [fqn for fqn, parameter in module.named_parameters() if not parameter.requires_grad]
    automatic = str(module.automatic_optimization)
    _compare({"frozen parameters": _listed(frozen), "automatic_optimization": automatic})


def check_same_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Check that all ranks step in the same way: a collective of a step that one rank makes alone is waited for.

    Raises:
        ConfigError: as ``check_same_settings``.
    """
    groups = [
        f"{type(optimizer).__name__}, group {index} of {len(optimizer.param_groups)}: {_settings(group)}"
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
    ]
    _compare({"optimizers": _listed(groups)})


def _settings(group: Mapping[str, Any]) -> str:
    shown = {name: value for name, value in group.items() if isinstance(value, int | float | str | tuple)}
    return ", ".join(f"{name}={value}" for name, value in shown.items())


def _compare(mine: dict[str, str]) -> None:
    sums = gather_numbers(zlib.crc32(json.dumps(mine).encode()))
    other = next((rank for rank, value in enumerate(sums) if value != sums[0]), None)
    if other is None:
        return
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    first, second = everyone[0], everyone[other]
    name = next(name for name in first if first[name] != second[name])
    raise ConfigError(
        f"The ranks were given different settings: {name}: {_without(first[name], second[name])} on rank 0,"
        f" {_without(second[name], first[name])} on rank {other}. Give every rank the same."
    )


def _listed(names: list[str]) -> str:
    return "\n".join(names)


def _without(text: str, other: str) -> str:
    """The lines of a setting that differ, in one."""
    lines = [line for line in text.splitlines() if line not in other.splitlines()]
    return ", ".join(lines[:3]) + (", ..." if len(lines) > 3 else "") if lines else "none of these"
