"""A model, data and settings from a file of LightningCLI, read by LightningCLI itself, without weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from jsonargparse import ArgumentError
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.config.precision import PrecisionName
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.errors import ConfigError
from lightning_3d.strategy import ThreeDStrategy

T = TypeVar("T")
_LEFT_OUT = ("callbacks", "logger", "profiler", "plugins")
"""Settings of the Trainer whose objects no plan needs; some write files or call servers when they are made."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training to be planned."""

    module: LightningModule
    """On the meta device, if it can be made there."""
    data: object
    """A replica's batch, a DataLoader or a LightningDataModule."""
    config: ThreeDConfig = field(default_factory=ThreeDConfig)
    precision: PrecisionName = "32-true"
    world_size: int = 0
    """0 where nobody has said it."""


def read_cli_config(
    path: str, model_class: Callable[..., Any] | None, data_class: Callable[..., Any] | None
) -> Training:
    """Make what a file of LightningCLI names.

    Args:
        model_class: The class or function that the program gives to LightningCLI; None if the file names it.
        data_class: The same of the data.

    Raises:
        ConfigError: The file can't be read, or the strategy is another one.
    """
    raises = {"exit_on_error": False}
    try:
        cli = _Planned(
            model_class,
            data_class,
            args=["fit", f"--config={path}"],
            save_config_callback=None,
            seed_everything_default=False,
            parser_kwargs={**raises, "fit": raises},
        )
    except ArgumentError as error:
        hint = "name classes that the program gives LightningCLI: plan MODEL [DATA] --cli_config FILE"
        text = " ".join(error.message.split())
        raise ConfigError(f"{path}: {text}" + (f"; {hint}" if None in (model_class, data_class) else "")) from error
    strategy, trainer = cli.strategy, cli.config.fit.trainer
    if strategy != "3d" and not isinstance(strategy, ThreeDStrategy):
        raise ConfigError(f"{path} has trainer.strategy: {strategy}, which is no ThreeDStrategy: set it to 3d")
    if cli.datamodule is None:
        raise ConfigError(f"{path} names no data, of which a batch is planned")
    devices = len(trainer.devices) if isinstance(trainer.devices, list) else trainer.devices
    is_known = isinstance(devices, int) and devices > 0
    return Training(
        module=cli.model,
        data=cli.datamodule,
        config=strategy.config if isinstance(strategy, ThreeDStrategy) else ThreeDConfig(),
        precision=trainer.precision or "32-true",
        world_size=devices * trainer.num_nodes if is_known else 0,
    )


def without_weights(make: Callable[[], T]) -> T:
    """Make a model on the meta device, as a plan needs no weights; on the CPU if its code reads values of tensors."""
    try:
        with torch.device("meta"):
            return make()
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error):
            raise
        rank_zero_info(f"The model is made in host memory with its weights, as its code reads values: {error}")
    return make()


class _Planned(LightningCLI):
    """Makes the model without weights, and no Trainer; runs nothing."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # LightningCLI's own warns of arguments beside the command line

    def instantiate_classes(self) -> None:
        self.config_init = self._made("data", "trainer")
        self.datamodule, self.strategy = self.config_init.fit.get("data"), self.config_init.fit.trainer.strategy
        self.model = without_weights(lambda: self._made("model").fit.model)
        self.trainer: Any = Trainer

    def _made(self, *names: str) -> Any:
        """The objects that are configured under some names."""
        config = self.config.clone()
        for name in {"model", "data", "trainer"}.difference(names):
            config.fit.pop(name, None)
        for name in _LEFT_OUT if "trainer" in config.fit else ():
            config.fit.trainer[name] = None
        return self.parser.instantiate_classes(config)

    def fit(self, **_: object) -> None:
        """Nothing."""
