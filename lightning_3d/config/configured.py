"""Strategies made from files: of this package's settings, or of DeepSpeed's."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Self

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_3d.config.deepspeed import FromDeepSpeed, read_deepspeed
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.errors import ConfigError


class Configured:
    """A class whose constructor takes the fields of `ThreeDConfig`."""

    deepspeed: FromDeepSpeed | None = None
    """The DeepSpeed config that it was made from."""

    @classmethod
    def from_config(cls, config: str | os.PathLike[str] | Mapping[str, object], overrides: Sequence[str] = ()) -> Self:
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
        config: str | os.PathLike[str] | Mapping[str, object],
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
