"""``lightning-3d plan``: what a training would be on any number of ranks, without them."""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader

from lightning_3d.cli.output import show
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.errors import ConfigError
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.trainer.ahead import plan_ahead

HELP = "Plan a training on any number of ranks, without them: layout, memory, bytes, idle time."


def add_arguments(parser: ArgumentParser) -> None:
    """Give the parser its arguments."""
    parser.add_argument("model", type=str, help="import path of a LightningModule, or a function that makes it")
    parser.add_argument(
        "batch",
        type=str,
        help="import path of a function or class that gives a replica's batch, a DataLoader or a LightningDataModule",
    )
    parser.add_argument("--world_size", type=int, required=True, help="the number of ranks")
    parser.add_argument("--config", type=str, help="a YAML file with the settings of strategy='3d'")
    parser.add_argument(
        "--set", action="append", type=str, default=[], metavar="KEY=VALUE", help="a setting, such as zero.stage=3"
    )
    parser.add_argument("--precision", type=str, default="32-true", help="as of the Trainer")
    parser.add_argument(
        "--memory", type=float, help="GiB of a device, as activations.budget; what does not fit is refused"
    )
    parser.add_argument("--states", type=int, default=2, help="numbers that the optimizer keeps for each parameter")
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")


def run(chosen: Namespace) -> None:
    """Run it."""
    sys.path.insert(0, "")  # as `python -m` does
    batch = _first_batch(_made(chosen.batch))
    with torch.device("meta"):  # no weights are needed
        module = _made(chosen.model)
    if not isinstance(module, LightningModule):
        raise ConfigError(f"{chosen.model} gives a {type(module).__name__}: name a LightningModule")
    planned = plan_ahead(
        module,
        batch,
        ThreeDConfig.from_file(chosen.config, chosen.set),
        chosen.world_size,
        precision=ThreeDPrecision(chosen.precision),
        memory=chosen.memory,
        num_states=chosen.states,
    )
    show(json.dumps(planned.as_dict()) if chosen.json else planned)


def _made(path: str) -> Any:
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigError(f"{path} is no import path: write module.name")
    try:
        make: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{path} can't be imported, from the current folder either: {error}") from error
    try:
        inspect.signature(make).bind()
    except TypeError as error:
        raise ConfigError(f"{path} takes arguments ({error}): name a function that calls it with them") from error
    return make()


def _first_batch(data: Any) -> Any:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    return next(iter(data)) if isinstance(data, DataLoader) else data
