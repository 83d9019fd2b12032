"""``lightning-3d plan``: what a training would be on any number of ranks, without them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from rich.console import Console
from torch.utils.data import DataLoader

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
        "--set", nargs="+", type=str, default=[], metavar="KEY=VALUE", help="settings, such as zero.stage=3"
    )
    parser.add_argument("--precision", type=str, default="32-true", help="as of the Trainer")
    parser.add_argument("--memory", type=float, help="GiB of a device; a layout that does not fit is refused")
    parser.add_argument("--states", type=int, default=2, help="numbers that the optimizer keeps for each parameter")
    parser.add_argument("--json", action="store_true", help="for programs; sizes in bytes")


def run(chosen: Namespace) -> None:
    """Run it."""
    sys.path.insert(0, "")  # as `python -m` does
    batch = _first_batch(_imported(chosen.batch)())
    with torch.device("meta"):  # no weights are needed
        module = _imported(chosen.model)()
    if not isinstance(module, LightningModule):
        raise ConfigError(f"{chosen.model} gives a {type(module).__name__}: name a LightningModule")
    if chosen.config is None:
        config = ThreeDConfig.from_mapping(OmegaConf.from_dotlist(chosen.set))
    else:
        config = ThreeDConfig.from_file(chosen.config, chosen.set)
    planned = plan_ahead(
        module,
        batch,
        config,
        chosen.world_size,
        precision=ThreeDPrecision(chosen.precision),
        memory=chosen.memory,
        num_states=chosen.states,
    )
    if chosen.json:
        print(json.dumps(planned.as_dict()))
    else:
        Console(width=None if sys.stdout.isatty() else 120).print(planned)


def _imported(path: str) -> Callable[[], Any]:
    module, _, name = path.rpartition(".")
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{path} can't be imported, from the current folder either: {error}") from error
    return found


def _first_batch(data: Any) -> Any:
    if isinstance(data, LightningDataModule):
        data.prepare_data()
        data.setup("fit")
        data = data.train_dataloader()
    return next(iter(data)) if isinstance(data, DataLoader) else data
