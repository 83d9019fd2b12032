"""The settings of a 3D-parallel run: typed, frozen and checked, wherever they come from.

Python, YAML files, dotlist overrides, `LightningCLI` and Hydra all end in one :class:`ThreeDConfig`. Every value is
checked against the annotation of its field when the object is made, so no later code meets an unknown key, a
misspelt choice or a size of 0. What depends on the world size or on the model is decided elsewhere.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # PyYAML ships no types; omegaconf depends on it

from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.config.checks import Size, check_values
from lightning_3d.config.compile import CompileConfig
from lightning_3d.config.context import ContextConfig
from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.errors import ConfigError

_STRATEGY = "lightning_3d.ThreeDStrategy"
_PLANNED = ("zero", "pipeline", "activations")  # sections: a layout is given where any of them is


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How the ranks of one model replica are kept on the same batch, and resumed runs on the batch that is next."""

    section: ClassVar[str] = "batch"

    check: Literal["start", "always", "never"] = "start"
    """When to compare a checksum of the batch within each replica: on the first steps, on every step, or not."""

    broadcast: bool = False
    """Send the batch of the replica's first rank to its other ranks, for data that differ from rank to rank."""

    resume: Literal["exact", "restart"] = "exact"
    """How a run goes on in the middle of an epoch, from dataloaders that have no ``state_dict``: after the batches that
    were trained on, which are read again and left, or, as Lightning does, from the first batch."""

    def __post_init__(self) -> None:
        check_values(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeDConfig:
    """All settings of ``Trainer(strategy="3d")``.

    Raises:
        ConfigError: a value that its field does not allow, or settings that contradict each other.

    """

    section: ClassVar[str] = ""

    layout: Literal["auto", "planned", "given"] = "auto"
    """Who chooses sizes, ZeRO stage, microbatches and recomputation. ``"planned"``: a fit does, by the predicted time
    of a sample in what fits the devices, and keeps all that is set to other than its default. ``"given"``: the
    settings. ``"auto"``: the settings, where a size is other than its default or any key of ``zero``, ``pipeline`` and
    ``activations`` is set; else a fit chooses, and has a replica on every rank, as DDP does, as long as one fits, so
    that a step has as many samples."""

    pipeline_parallel_size: Size = 1
    """Number of pipeline stages."""

    data_parallel_size: Size | Literal["auto"] = "auto"
    """Number of model replicas; ``"auto"`` is the world size divided by the other sizes."""

    tensor_parallel_size: Size = 1
    """Ranks that share each block's weights."""

    context_parallel_size: Size = 1
    """Ranks that share each sequence."""

    samples_per_step: Size | None = None
    """Samples of all replicas in an optimizer step, on any number of them: as many batches are accumulated as it takes.
    ``None``: a batch of each replica, times ``Trainer(accumulate_grad_batches=...)``."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """How much of the training state the data-parallel ranks share."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Stages, microbatches and schedule."""

    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Checks of the tensor-parallel plans."""

    context: ContextConfig = field(default_factory=ContextConfig)
    """Attention on slices of sequences."""

    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    """How much of the blocks' forwards is kept for their backwards."""

    compile: CompileConfig = field(default_factory=CompileConfig)
    """Whether blocks are compiled, and by what."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """Checks of the batch within a replica."""

    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    """How 16-bit numbers train a model; which numbers those are is ``Trainer(precision=...)``."""

    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """How checkpoints are written."""

    save_distributed_checkpoint: bool | Literal["auto"] = "auto"
    """``True``: a folder that every rank writes its part of. ``False``: one plain Lightning ``.ckpt`` file. ``"auto"``:
    a file, or a folder where that would be larger than ``checkpoint.max_file_size``."""

    def __post_init__(self) -> None:
        check_values(self)
        _check_pipeline(self)
        _check_compile(self)
        _check_power_sgd(self)
        _check_partition(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ThreeDConfig:
        """Read a config from nested mappings.

        Args:
            mapping: The keys of this class. A section (``zero``, ``pipeline``, ...) is a mapping, an OmegaConf node,
                its dataclass, or ``None`` for its defaults. A ``_target_`` of Hydra may name the strategy.

        Raises:
            ConfigError: an unknown key (names the nearest valid one) or a value that is not allowed.

        """
        mapping = _without_target(mapping)
        config: ThreeDConfig = _read_section(cls, mapping)
        is_set = isinstance(mapping, Mapping) and any(mapping.get(section) for section in _PLANNED)
        return replace(config, layout="given") if config.layout == "auto" and is_set else config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()) -> ThreeDConfig:
        """Read a YAML file, then apply overrides.

        Args:
            path: A YAML file with the keys of this class at the top level, or a mapping as it would hold.
                Interpolations are resolved.
            overrides: Dotted assignments such as ``"zero.stage=2"``; later ones win.

        Raises:
            ConfigError: the file can't be read, an override is no assignment, an unknown key or a value that is not
                allowed; names the file and the overrides.

        """
        file = "no file" if isinstance(path, Mapping) else os.fspath(path)
        source = f"{file} with overrides {list(overrides)}" if overrides else file
        try:
            for override in overrides:
                if "=" not in override:
                    raise ConfigError(f"override {override!r} is no assignment: write key=value, such as zero.stage=2")
            merged = OmegaConf.create(dict(path)) if isinstance(path, Mapping) else OmegaConf.load(Path(path))
            if not isinstance(merged, DictConfig):
                raise ConfigError("the file holds no mapping at its top level: write lines such as zero: {stage: 2}")
            merged.merge_with(OmegaConf.from_dotlist(list(overrides)))
            return cls.from_mapping(merged)
        except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"can't read the config {source}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    def as_mapping(self) -> dict[str, Any]:
        """Nested mappings from which it can be read again; without what nobody has set, where that is to be planned."""
        unset = _PLANNED if self.is_planned and self.layout == "auto" else ()
        return {key: value for key, value in asdict(self).items() if key not in unset}

    @property
    def is_planned(self) -> bool:
        """Whether a fit chooses the layout, or what is left of it."""
        if self.layout != "auto":
            return self.layout == "planned"
        sizes = (self.pipeline_parallel_size, self.data_parallel_size, self.tensor_parallel_size)
        sections = (self.zero, self.pipeline, self.activations)
        return sizes == (1, "auto", 1) and sections == (ZeroConfig(), PipelineConfig(), ActivationsConfig())

    @property
    def num_microbatches(self) -> int:
        """Microbatches per rank and batch, with ``"auto"`` resolved to the number of stages."""
        if self.pipeline.mode == "inline":
            return 1
        if self.pipeline.num_microbatches == "auto":
            return self.pipeline_parallel_size
        return self.pipeline.num_microbatches


_SECTIONS: tuple[Any, ...] = tuple(kind for kind in get_type_hints(ThreeDConfig).values() if is_dataclass(kind))


def _read_section(cls: Any, source: object) -> Any:
    """Make the config dataclass `cls` from a mapping, an OmegaConf node, an instance of it or None (defaults)."""
    if source is None:
        return cls()
    if isinstance(source, cls):
        return source
    if OmegaConf.is_config(source):
        source = _plain_container(source)
    if not isinstance(source, Mapping):
        raise ConfigError(f"{cls.section or 'config'}={source!r} is not allowed: use a mapping or a {cls.__name__}")
    annotations, names = get_type_hints(cls, include_extras=True), [item.name for item in fields(cls)]
    values: dict[str, object] = {}
    for key, value in source.items():
        if key not in names:
            raise _unknown_key(f"{cls.section}.".lstrip("."), str(key), names)
        values[key] = _read_section(annotations[key], value) if is_dataclass(annotations[key]) else value
    return cls(**values)


def _plain_container(node: object) -> object:
    """The dicts and lists of an OmegaConf node, with interpolations resolved."""
    try:
        return OmegaConf.to_container(cast(Any, node), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config can't be resolved: {error}") from error


def _unknown_key(prefix: str, key: str, names: Sequence[str]) -> ConfigError:
    """The error for a key that is none of `names`, below `prefix`; searches all sections for the nearest valid key."""
    here = [prefix + name for name in names]
    dotted = here + [item.name for item in fields(ThreeDConfig)]
    for section in _SECTIONS:
        dotted += [f"{section.section}.{item.name}" for item in fields(section)]

    def likeness(name: str) -> float:
        pairs = ((prefix + key, name), (key, name.rpartition(".")[2]))  # "stage" -> "zero.stage"
        return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    nearest = max(dotted, key=likeness)
    return ConfigError(
        f"unknown config key {prefix + key!r}: the nearest valid key is {nearest!r}; valid here: {', '.join(here)}"
    )


def _check_power_sgd(config: ThreeDConfig) -> None:
    """Refuse compression of tensor-parallel shards."""
    if config.zero.power_sgd_rank is not None and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"zero.power_sgd_rank={config.zero.power_sgd_rank} with tensor_parallel_size={config.tensor_parallel_size}:"
            " each tensor-parallel rank would compress its own shards, and copies of a parameter could drift apart; use"
            " one of them"
        )


def _check_partition(config: ThreeDConfig) -> None:
    """Refuse to cut activations for one rank."""
    if config.activations.partition and config.tensor_parallel_size == 1:
        raise ConfigError(
            "activations.partition=True lets tensor-parallel ranks keep a slice each of what they all have, but"
            " tensor_parallel_size=1: set it to 2 or more, or activations.partition=False"
        )


def _check_cut_points(partition: str | tuple[str, ...], num_stages: int) -> None:
    """Refuse a list of blocks that is not as long as there are stages to begin."""
    if isinstance(partition, tuple) and len(partition) != num_stages - 1:
        raise ConfigError(
            f"pipeline.partition={list(partition)} names {len(partition)} blocks, but there are {num_stages} stages:"
            f" name {num_stages - 1}, one with which each stage after the first begins"
        )


def _check_compile(config: ThreeDConfig) -> None:
    """Refuse what compiled blocks can't do."""
    if not config.compile.enabled:
        return
    if config.activations.recompute == "selective" and config.activations.partition:
        raise ConfigError(
            "activations.partition=True with activations.recompute='selective' and compile.enabled=True: compiled"
            " blocks keep what their backward needs by themselves, and inputs in full. Use"
            " activations.recompute='full', or activations.partition=False"
        )


def _without_target(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file of Hydra's that makes the strategy has its settings beside the class."""
    target = mapping.get("_target_", _STRATEGY) if isinstance(mapping, Mapping) else _STRATEGY
    if target != _STRATEGY:
        raise ConfigError(f"_target_: {target} has not the settings of strategy='3d': those of {_STRATEGY} are read")
    return {key: value for key, value in mapping.items() if key != "_target_"} if "_target_" in mapping else mapping


def _check_pipeline(config: ThreeDConfig) -> None:
    """Refuse what the schedule can't run."""
    pp, num_microbatches = config.pipeline_parallel_size, config.num_microbatches
    schedule, per_rank = config.pipeline.schedule, config.pipeline.num_local_stages
    _check_cut_points(config.pipeline.partition, len(config.pipeline.stage_ranks(pp)))
    if config.pipeline.mode == "inline":
        return
    if pp == 1 and num_microbatches > 1:
        raise ConfigError(
            f"pipeline.num_microbatches={num_microbatches} needs a pipeline, but pipeline_parallel_size=1: use 1 or "
            f"'auto', and Trainer(accumulate_grad_batches={num_microbatches}) to accumulate gradients"
        )
    if schedule == "1f1b" and num_microbatches < pp:
        raise ConfigError(
            f"pipeline.num_microbatches={num_microbatches} is less than pipeline_parallel_size={pp}, which "
            f"schedule '1f1b' can't fill: use at least {pp} microbatches, or schedule 'gpipe'"
        )
    wanted = {"gpipe": per_rank == 1, "1f1b": per_rank == 1, "zbv": per_rank == 2}.get(schedule, per_rank >= 2)
    if not wanted:
        needed = {"gpipe": "1", "1f1b": "1", "zbv": "2"}.get(schedule, "2 or more")
        raise ConfigError(
            f"pipeline.stages_per_rank={per_rank} does not suit schedule '{schedule}', which runs {needed} stages on "
            "each rank: change one of them"
        )
    rounds = max(1, num_microbatches // pp)
    if schedule in ("interleaved", "interleaved_zero_bubble") and num_microbatches % rounds:
        nearest = num_microbatches // rounds * rounds
        raise ConfigError(
            f"pipeline.num_microbatches={num_microbatches} is no multiple of the {rounds} rounds in which schedule "
            f"'{schedule}' takes them on {pp} ranks: use {nearest} or {rounds * pp}"
        )
