"""Strategies made from files: of this package's settings, or of DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.config.deepspeed import FromDeepSpeed, read_deepspeed
from lightning_3d.config.deepspeed_optimizers import build
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.errors import ConfigError


class Configured:
    """A class whose constructor takes the fields of `ThreeDConfig`."""

    deepspeed: FromDeepSpeed | None = None
    """The DeepSpeed config that it was made from."""

    _has_given_optimizers = False

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> Self:
        """Make a strategy from a YAML file or a mapping (a dict or an OmegaConf node).

        Args:
            config: Path of a YAML file with the keys of ``ThreeDConfig``, or such a mapping.
            overrides: Assignments such as ``"zero.stage=2"`` to the file's values, applied in order.

        Raises:
            ConfigError: an unknown key or a value that is not allowed.
        """
        if isinstance(config, (str, os.PathLike)):
            read = ThreeDConfig.from_file(config, overrides)
        elif overrides:
            raise ConfigError(f"overrides {list(overrides)} apply to a file; change the mapping itself instead")
        else:
            read = ThreeDConfig.from_mapping(config)
        return cls(**read.as_mapping())

    @classmethod
    def from_deepspeed(
        cls,
        config: str | os.PathLike[str] | Mapping[str, Any],
        *,
        pipeline_parallel_size: int | None = None,
        leave_out: Collection[str] = (),
    ) -> Self:
        """Make a strategy from a DeepSpeed config, and say which keys have no effect here, and why.

        What the config says of precision, clipping and accumulation is the Trainer's: it is refused at the start of a
        run whose Trainer does otherwise.

        Args:
            config: Path of the JSON file, or what it holds.
            pipeline_parallel_size: The number of pipeline stages, which DeepSpeed takes from code.
            leave_out: Keys that code takes the place of, as ``["scheduler"]`` where a callback sets the rates.

        Raises:
            ConfigError: the file can't be read, a key is not known, or asks for what would change the training and is
                not done here.
        """
        read = read_deepspeed(config, pipeline_parallel_size=pipeline_parallel_size, leave_out=leave_out)
        made = cls(**read.strategy)
        made.deepspeed = read
        rank_zero_info(f"From the DeepSpeed config:\n{read}")
        return made

    def give_optimizers(self, module: LightningModule) -> None:
        """Let a module without ``configure_optimizers`` have one that builds what the DeepSpeed config says.

        Raises:
            ConfigError: the module has one, but the config a scheduler that it may lack.
        """
        built = {} if self.deepspeed is None else self.deepspeed.built
        if not is_overridden("configure_optimizers", module):
            if "optimizer" in built:
                module.configure_optimizers = lambda: build(module, built)  # type: ignore[method-assign]
                self._has_given_optimizers = True
            elif built:
                raise ConfigError(
                    f"the DeepSpeed config has a scheduler and no optimizer, and {type(module).__name__} no"
                    " configure_optimizers: add an optimizer to one of them"
                )
        elif "scheduler" in built:
            raise ConfigError(
                f"the DeepSpeed config has a scheduler, but {type(module).__name__} has a configure_optimizers of its"
                " own: return the scheduler from there, too, and say leave_out=['scheduler']"
            )
        elif built:
            rank_zero_info("The optimizer of the DeepSpeed config is left out: configure_optimizers returns one.")

    def take_optimizers(self, module: LightningModule) -> None:
        """Undo it."""
        if self._has_given_optimizers:
            del vars(module)["configure_optimizers"]
            self._has_given_optimizers = False

    def check_deepspeed(self, trainer: Trainer, precision: str, num_replicas: int) -> None:
        """Refuse a Trainer that does otherwise than the DeepSpeed config says.

        Raises:
            ConfigError: it does.
        """
        if self.deepspeed is not None:
            self.deepspeed.check(
                num_replicas,
                precision=precision,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
            )
