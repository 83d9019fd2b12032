"""The settings of a 3D-parallel run: typed, frozen and checked, wherever they come from.

Python, YAML files, dotlist overrides, `LightningCLI` and Hydra all end in one :class:`ThreeDConfig`. Every value is
checked against the annotation of its field when the object is made, so no later code meets an unknown key, a
misspelt choice or a size of 0. What depends on the world size or on the model is decided elsewhere.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, get_origin, get_type_hints

import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]  # PyYAML ships no types; omegaconf depends on it

from lightning_3d.config.values import AtLeast, accepts, describe, nearest_value
from lightning_3d.errors import ConfigError

Size = Annotated[int, AtLeast(1)]

PARTITION_METHODS = ("parameters", "uniform", "time", "memory")
"""Values of ``pipeline.partition`` that stand for themselves."""


TENSOR_STYLES = ("column", "row", "replicate", "vocabulary")
"""The styles that a rule of ``tensor.plan`` can give a weight."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroConfig:
    """How much of the training state the data-parallel ranks share (ZeRO, Rajbhandari et al. 2020)."""

    section: ClassVar[str] = "zero"

    stage: Literal[0, 1, 2, 3] = 1
    """0: replicate everything; 1: shard the optimizer state; 2: and the gradients; 3: and the parameters. Up to stage 2
    parameters are plain and whole on every rank, as under DDP; at stage 3 they are FSDP2's."""

    optimizer_steps: Literal["auto", "rows", "parameters", "all"] = "auto"
    """How much of a parameter an optimizer has to see at once. ``"rows"``: any rows of one, as those that work element
    by element (AdamW). ``"parameters"``: whole parameters (Muon, LAMB). ``"all"``: all parameters together (LBFGS).
    ``"auto"`` tries each optimizer on small tensors. At stages 1 and 2 ranks share the rows, or the parameters, each of
    which one rank steps; with ``"all"`` every rank steps everything."""

    show_gradients: bool | Literal["auto"] = "auto"
    """Whether stages 1 and 2 gather the reduced gradients, so that ``grad`` is whole before the optimizer's step as
    under DDP, which sends the parameters' size once more. ``"auto"``: where your module or a callback of yours
    overrides a hook from the backward to the end of the batch, or optimizes manually. Else ``grad`` is None there."""

    overlap_gather: bool = False
    """Whether the parameters that stages 1 and 2 gather after the optimizer's step may still be on their way in the
    next forward, which waits for each where torch's functions read it; TorchScript modules and compiled ones are waited
    for before. What reads parameters beneath torch's functions otherwise would get old values without an error, so it
    is off by default: ``torch.func`` transforms and extensions in C++ that get a parameter, compiled functions."""

    communication_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype in which gradients are reduced; ``"auto"`` is their own. They are divided by the number of replicas
    before, so that float16 does not overflow where the mean does not."""

    bucket_size: Annotated[float, AtLeast(0)] | Literal["auto"] = "auto"
    """MiB of parameters whose gradients are reduced together at stages 0 to 2; ``"auto"`` is 25 as in DDP, or less so
    that there are four buckets, but at least 1. At stage 3 a block is a bucket."""

    power_sgd_rank: Size | None = None
    """Compress gradients at stage 0 to matrices of this rank, with error feedback (PowerSGD, Vogels et al. 2019), by
    torch's hook for DDP. What is remembered of gradients for the next step is in no checkpoint, as under DDP: a resumed
    run begins anew, uncompressed reductions included. ``None`` compresses nothing."""

    power_sgd_start: Annotated[int, AtLeast(2)] | Literal["auto"] = "auto"
    """Reductions that go before without compression; ``"auto"`` is 1000, as in torch."""

    averaging_period: Size | None = None
    """Reduce no gradients at stage 0, but average parameters after every this many steps of their optimizer (post-local
    SGD, Lin et al. 2018), also before a validation or a test, for a checkpoint, and at the end of ``fit``. Gradients,
    their norm and the states of optimizers are each replica's own; a checkpoint holds the states of the first replica.
    ``None`` reduces gradients."""

    offload_optimizer: str = "none"
    """Where optimizer states lie and optimizers step. ``"none"``: the device. ``"cpu"``: host memory. Any other string
    is a directory, for fast disks: states lie in memory-mapped files there, which have no names and are gone with the
    process. The fused implementations of torch's optimizers (``fused=True``) are the fastest on CPUs."""

    offload_params: str = "none"
    """Where the shards of parameters lie at stage 3: as ``offload_optimizer``, which must not be ``"none"`` then, as
    parameters are stepped where they lie."""

    offload_window: Annotated[float, AtLeast(0)] = 64
    """MiB of parameters that an offloaded optimizer steps at a time, while those before and after them are copied."""

    shard_size: Annotated[int, AtLeast(2)] | Literal["auto"] = "auto"
    """How many consecutive data-parallel ranks share the training state; each such group holds all of it (hybrid
    sharding, as FSDP's HSDP). With the ranks of a node, parameters are gathered inside of nodes, and only each rank's
    part of the gradients crosses them. ``"auto"``: all data-parallel ranks."""

    reshard_after_forward: bool | Literal["auto"] = "auto"
    """Whether stage 3 frees the gathered parameters of a block after its forward. ``True`` holds the fewest: each
    backward gathers them again and reduces its gradients; with a pipeline every microbatch does. ``False`` is faster,
    and holds this rank's parameters whole from their first forward to the end of the backward. With a pipeline that is
    the end of the step: it gathers once, adds up whole gradients, and reduces them once. ``"auto"`` is ``False`` with
    a pipeline, else ``True``."""

    prefetch: Size | Literal["auto"] = "auto"
    """How many blocks ahead stage 3 gathers parameters, in forward and backward; more hides slow networks and holds
    more. ``"auto"`` is FSDP2's own: the next one, as soon as the host gets there."""

    def __post_init__(self) -> None:
        for name in ("offload_optimizer", "offload_params"):
            given: object = getattr(self, name)
            if isinstance(given, os.PathLike):
                object.__setattr__(self, name, os.fspath(given))
        _check_values(self)
        _check_offload(self)
        _check_zero(self)

    @property
    def dtype(self) -> torch.dtype | None:
        """``communication_dtype``; None for that of the gradients."""
        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        return dtypes.get(self.communication_dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """How the model is cut into stages and how the batch flows through them."""

    section: ClassVar[str] = "pipeline"

    num_microbatches: Size | Literal["auto"] = "auto"
    """Pieces that each rank's batch is cut into; ``"auto"`` is the number of stages."""

    partition: str | tuple[str, ...] = "parameters"
    """The load to balance. ``"parameters"``; ``"uniform"``: calls of blocks; ``"time"``: forward and
    backward of the blocks, measured on the strategy's device; ``"memory"``: bytes of weights, gradients, AdamW's state
    and activations. ``"type:REGEX"`` balances parameters and takes the modules whose class name matches the regular
    expression as the blocks. A list of FQNs names the block with which each stage after the first begins."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv"] = "1f1b"
    """``"gpipe"``: all forwards, then all backwards (Huang et al. 2019). ``"1f1b"``: one forward, one backward in
    turn, which holds fewer activations (Narayanan et al. 2021); needs as many microbatches as ranks.
    ``"interleaved"``: 1F1B with several stages per rank, which shrinks the bubble (Narayanan et al. 2021).
    ``"interleaved_zero_bubble"`` and ``"zbv"`` also split the backward, so that weight gradients fill the bubble (Qi et
    al. 2023); with these, ZeRO stages 2 and 3 keep gradients and parameters whole until the end of the step."""

    stages_per_rank: Size | Literal["auto"] = "auto"
    """Stages that each rank runs; ``"auto"`` is 2 for the last three schedules and 1 for the others."""

    def __post_init__(self) -> None:
        given: object = self.partition
        if isinstance(given, list):  # from Python or YAML
            object.__setattr__(self, "partition", tuple(given))
        _check_values(self)
        _check_partition(self.partition)

    @property
    def num_local_stages(self) -> int:
        """Stages per rank, with ``"auto"`` resolved."""
        if self.stages_per_rank == "auto":
            return 1 if self.schedule in ("gpipe", "1f1b") else 2
        return self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are computed apart from the rest of the backward."""
        return self.schedule in ("interleaved_zero_bubble", "zbv")

    def stage_ranks(self, pp: int) -> tuple[int, ...]:
        """For every stage the index of its rank on a pp axis of ``pp`` ranks: round and round, or there and back."""
        if pp == 1:
            return (0,)
        if self.schedule == "zbv":
            return (*range(pp), *reversed(range(pp)))
        return tuple(range(pp)) * self.num_local_stages


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorConfig:
    """How tensor-parallel plans are made and accepted."""

    section: ClassVar[str] = "tensor"

    plan: tuple[tuple[str, str], ...] = ()
    """Rules in place of what planning would find: pairs of an FQN pattern (``"blocks.*.attention.out"``; ``*`` and
    ``?`` as in a shell) and a style: ``"column"``, ``"row"``, ``"replicate"`` or ``"vocabulary"``. Of several rules
    that name a weight the last one holds. Without tensor parallel there is nothing to plan."""

    sequence_parallel: bool = False
    """Let norms, dropout and residuals between a block's sharded weights work on slices of the sequence, which takes
    1 / tensor_parallel_size of the memory for their activations (Korthikanti et al. 2022). For blocks whose first
    argument is (B, T, D) and whose T the size divides."""

    compile: bool = False
    """Compile each sharded block, its collectives included; those sharded over the vocabulary run eagerly. A block is
    compiled once for each kind of call: shapes, values of its attributes and of arguments other than tensors, training
    or evaluation. One that does more than compute on tensors (draws random numbers as dropout does, sets attributes,
    looks into its data) runs eagerly, with a warning that says why. It must not read anything else that changes; and
    what activation checkpointing inside of it would recompute is for the compiler to decide."""

    compile_backend: Literal["inductor", "aot_eager"] = "inductor"
    """As for ``torch.compile``. ``"aot_eager"`` fuses nothing, and needs no compiler on the machine."""

    verify: bool = True
    """Compare every distinct planned block with its dense self before training, and drop the plans that differ."""

    verify_tolerance: Annotated[float, AtLeast(0)] | Literal["auto"] = "auto"
    """Largest difference that the comparison allows, relative to the largest dense value; ``"auto"`` is the square root
    of the weights' machine epsilon (3e-4 in fp32). Reordered fp32 sums differ by about 1e-6, wrong plans by about 1."""

    def __post_init__(self) -> None:
        given: object = self.plan
        if isinstance(given, (list, tuple)):  # from Python or YAML
            object.__setattr__(self, "plan", tuple(tuple(r) if isinstance(r, (list, tuple)) else r for r in given))
        _check_values(self)
        _check_rules(self.plan)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchConfig:
    """How the ranks of one model replica are kept on the same batch."""

    section: ClassVar[str] = "batch"

    check: Literal["start", "always", "never"] = "start"
    """When to compare a checksum of the batch within each replica: on the first steps, on every step, or not."""

    broadcast: bool = False
    """Send the batch of the replica's first rank to its other ranks, for data that differ from rank to rank."""

    def __post_init__(self) -> None:
        _check_values(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ThreeDConfig:
    """All settings of ``Trainer(strategy="3d")``.

    Raises:
        ConfigError: a value that its field does not allow, or settings that contradict each other.

    """

    section: ClassVar[str] = ""

    pipeline_parallel_size: Size = 1
    """Number of pipeline stages."""

    data_parallel_size: Size | Literal["auto"] = "auto"
    """Number of model replicas; ``"auto"`` is the world size divided by the other sizes."""

    tensor_parallel_size: Size = 1
    """Ranks that share each block's weights."""

    context_parallel_size: Size = 1
    """Ranks that share each sequence; only 1 so far."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    """How much of the training state the data-parallel ranks share."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Stages, microbatches and schedule."""

    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Checks of the tensor-parallel plans."""

    batch: BatchConfig = field(default_factory=BatchConfig)
    """Checks of the batch within a replica."""

    save_distributed_checkpoint: bool = True
    """``True``: a folder that every rank writes its part of. ``False``: one plain Lightning ``.ckpt`` file."""

    def __post_init__(self) -> None:
        _check_values(self)
        _check_pipeline(self)
        _check_compile(self)
        _check_power_sgd(self)
        if self.context_parallel_size > 1:
            raise ConfigError(
                f"context_parallel_size={self.context_parallel_size}: context parallel is not built yet; use 1"
            )

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ThreeDConfig:
        """Read a config from nested mappings.

        Args:
            mapping: The keys of this class. A section (``zero``, ``pipeline``, ...) is a mapping, an OmegaConf node,
                its dataclass, or ``None`` for its defaults.

        Raises:
            ConfigError: an unknown key (names the nearest valid one) or a value that is not allowed.

        """
        config: ThreeDConfig = _read_section(cls, mapping)
        return config

    @classmethod
    def from_file(cls, path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ThreeDConfig:
        """Read a YAML file, then apply overrides.

        Args:
            path: A YAML file with the keys of this class at the top level. Interpolations are resolved.
            overrides: Dotted assignments such as ``"zero.stage=2"``; later ones win.

        Raises:
            ConfigError: the file can't be read, an override is no assignment, an unknown key or a value that is not
                allowed; names the file and the overrides.

        """
        source = f"{os.fspath(path)} with overrides {list(overrides)}" if overrides else os.fspath(path)
        try:
            for override in overrides:
                if "=" not in override:
                    raise ConfigError(f"override {override!r} is no assignment: write key=value, such as zero.stage=2")
            merged = OmegaConf.load(Path(path))
            if not isinstance(merged, DictConfig):
                raise ConfigError("the file holds no mapping at its top level: write lines such as zero: {stage: 2}")
            merged.merge_with(OmegaConf.from_dotlist(list(overrides)))
            return cls.from_mapping(merged)
        except (OSError, UnicodeDecodeError, YAMLError, OmegaConfBaseException) as error:
            raise ConfigError(f"can't read the config {source}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @property
    def num_microbatches(self) -> int:
        """Microbatches per rank and batch, with ``"auto"`` resolved to the number of stages."""
        if self.pipeline.num_microbatches == "auto":
            return self.pipeline_parallel_size
        return self.pipeline.num_microbatches


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
    annotations = get_type_hints(cls, include_extras=True)
    names = {item.name for item in fields(cls)}
    values: dict[str, object] = {}
    for key, value in source.items():
        if key not in names:
            raise _unknown_key(cls, str(key))
        annotation = annotations[key]
        values[key] = _read_section(annotation, value) if is_dataclass(annotation) else value
    return cls(**values)


def _plain_container(node: object) -> object:
    """The dicts and lists of an OmegaConf node, with interpolations resolved."""
    try:
        return OmegaConf.to_container(cast(Any, node), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the config can't be resolved: {error}") from error


def _unknown_key(cls: Any, key: str) -> ConfigError:
    """The error for `key`, which `cls` does not have; searches all sections for the nearest valid key."""
    prefix = f"{cls.section}." if cls.section else ""
    here = [prefix + item.name for item in fields(cls)]
    dotted = [item.name for item in fields(ThreeDConfig)]
    for section in (ZeroConfig, PipelineConfig, TensorConfig, BatchConfig):
        dotted += [f"{section.section}.{item.name}" for item in fields(section)]
    # A key of this section wins; else one with the same last part elsewhere ("stage" -> "zero.stage").
    nearest = (
        difflib.get_close_matches(prefix + key, here, n=1)
        or [name for name in dotted if name.rsplit(".", 1)[-1] == key]
        or difflib.get_close_matches(prefix + key, dotted, n=1, cutoff=0)
    )
    return ConfigError(
        f"unknown config key {prefix + key!r}: the nearest valid key is {nearest[0]!r}; valid here: {', '.join(here)}"
    )


def _check_values(config: Any) -> None:
    """Check every field of a config dataclass against its annotation."""
    prefix = f"{config.section}." if config.section else ""
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        if get_origin(annotation) is ClassVar:
            continue
        value = getattr(config, name)
        if not accepts(annotation, value):
            nearest = nearest_value(annotation, value)
            hint = "" if nearest is None else f" (nearest: {nearest!r})"
            raise ConfigError(f"{prefix}{name}={value!r} is not allowed: use {describe(annotation)}{hint}")


def _check_offload(config: ZeroConfig) -> None:
    """Refuse places to offload to that are no directories, and those that do not go together."""
    for name, place in (("offload_optimizer", config.offload_optimizer), ("offload_params", config.offload_params)):
        reserved = place.strip().lower()
        if place not in ("none", "cpu") and reserved in ("", "none", "cpu", "nvme", "disk", "gpu", "cuda"):
            nearest = "cpu" if reserved == "cpu" else "none"
            raise ConfigError(
                f"zero.{name}={place!r} is not allowed: use 'none', 'cpu' or a directory, such as"
                f" './{reserved or 'dir'}' (nearest: {nearest!r})"
            )
        if place not in ("none", "cpu") and sys.platform != "linux":
            raise ConfigError(f"zero.{name}={place!r}: offloading to files needs Linux; use 'cpu' or 'none'")
    if config.offload_params != "none" and config.stage != 3:
        raise ConfigError(
            f"zero.offload_params={config.offload_params!r} needs zero.stage=3: at stage {config.stage} every rank's"
            " forward uses whole parameters all the time. Use stage 3, or offload_params='none'"
        )
    if config.offload_params != "none" and config.offload_optimizer == "none":
        raise ConfigError(
            f"zero.offload_params={config.offload_params!r} does not go with zero.offload_optimizer='none': parameters"
            " are stepped where they lie. Set zero.offload_optimizer='cpu' or to a directory, too"
        )


_STAGES_OF: Mapping[str, tuple[tuple[int, ...], str]] = {
    "bucket_size": ((0, 1, 2), "at stage 3 each block is a bucket"),
    "show_gradients": ((0, 1, 2), "at stage 3 grad is the shard of a gradient"),
    "overlap_gather": ((1, 2), "stage 0 gathers nothing, and stage 3 each block when it runs"),
    "power_sgd_rank": ((0,), "torch's hook approximates the sum of gradients as a whole, which others scatter"),
    "shard_size": ((1, 2, 3), "stage 0 shards nothing"),
    "reshard_after_forward": ((3,), "up to stage 2 all parameters are whole on every rank"),
    "prefetch": ((3,), "up to stage 2 all parameters are whole on every rank"),
    "averaging_period": ((0,), "at others each replica steps a part of the parameters"),
}
"""Keys of ``zero`` -> the stages at which they can be set to more than their default, and why."""


def _check_zero(zero: ZeroConfig) -> None:
    """Refuse what a stage of ZeRO can't do, and settings that contradict each other."""
    for name, (stages, reason) in _STAGES_OF.items():
        value = getattr(zero, name)
        turns_off = value is False and name != "reshard_after_forward"
        is_set = value is not None and value != "auto" and not turns_off
        if is_set and zero.stage not in stages:
            raise ConfigError(
                f"zero.{name}={value!r} does not go with zero.stage={zero.stage}: {reason}; leave it out, or use stage"
                f" {' or '.join(map(str, stages))}"
            )
    if zero.power_sgd_rank is None and zero.power_sgd_start != "auto":
        raise ConfigError(
            f"zero.power_sgd_start={zero.power_sgd_start} delays a compression that is not asked for: set"
            " zero.power_sgd_rank, or leave it out"
        )
    if zero.power_sgd_rank is not None and zero.communication_dtype != "auto":
        raise ConfigError(
            f"zero.communication_dtype={zero.communication_dtype!r} with zero.power_sgd_rank={zero.power_sgd_rank}:"
            " gradients are compressed in one way; leave one of them out"
        )
    reducing = ("communication_dtype", "bucket_size", "power_sgd_rank")
    given = [name for name in reducing if getattr(zero, name) not in (None, "auto")]
    if zero.averaging_period is not None and given:
        raise ConfigError(
            f"zero.{given[0]}={getattr(zero, given[0])!r} says how gradients are reduced, but with"
            f" zero.averaging_period={zero.averaging_period} none are: leave one of them out"
        )


def _check_power_sgd(config: ThreeDConfig) -> None:
    """Refuse compression of tensor-parallel shards."""
    if config.zero.power_sgd_rank is not None and config.tensor_parallel_size > 1:
        raise ConfigError(
            f"zero.power_sgd_rank={config.zero.power_sgd_rank} with tensor_parallel_size={config.tensor_parallel_size}:"
            " each tensor-parallel rank would compress its own shards, and copies of a parameter could drift apart; use"
            " one of them"
        )


def _check_partition(partition: str | tuple[str, ...]) -> None:
    """Refuse a partition method that does not exist, a regular expression that does not compile, and equal FQNs."""
    if isinstance(partition, tuple):
        if len(set(partition)) < len(partition):
            raise ConfigError(f"pipeline.partition={list(partition)} names a block twice: name one for each stage")
        return
    if partition in PARTITION_METHODS:
        return
    rule, separator, pattern = partition.partition(":")
    if rule != "type" or not separator or not pattern:
        nearest = difflib.get_close_matches(partition, (*PARTITION_METHODS, "type:REGEX"), n=1, cutoff=0)[0]
        raise ConfigError(
            f"pipeline.partition={partition!r} is not allowed: use {', '.join(map(repr, PARTITION_METHODS))},"
            " 'type:REGEX' with a regular expression for class names, or a list of the FQNs of blocks"
            f" (nearest: {nearest!r})"
        )
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"pipeline.partition={partition!r} is no regular expression after 'type:': {error}") from None


def _check_rules(rules: tuple[tuple[str, str], ...]) -> None:
    """Refuse a rule of ``tensor.plan`` that is no pair of a pattern and a style."""
    for rule in rules:
        if len(rule) != 2:
            raise ConfigError(f"tensor.plan has the rule {list(rule)}: use pairs of an FQN pattern and a style")
        if rule[1] not in TENSOR_STYLES:
            nearest = difflib.get_close_matches(rule[1], TENSOR_STYLES, n=1, cutoff=0)[0]
            raise ConfigError(
                f"tensor.plan gives {rule[0]!r} the style {rule[1]!r}: use {', '.join(map(repr, TENSOR_STYLES))}"
                f" (nearest: {nearest!r})"
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
    if not config.tensor.compile:
        return
    if config.tensor_parallel_size == 1:
        raise ConfigError(
            "tensor.compile=True compiles blocks on shards, but tensor_parallel_size=1: compile them yourself, by"
            " block.compile() in configure_model"
        )
    if config.tensor.sequence_parallel:
        raise ConfigError(
            "tensor.compile=True with tensor.sequence_parallel=True would keep the gathered sequences that the latter"
            " is there to drop: use one of them"
        )
    if config.pipeline_parallel_size > 1 and config.pipeline.splits_backward:
        raise ConfigError(
            f"pipeline.schedule='{config.pipeline.schedule}' computes weight gradients apart, but the backward of a"
            " block that tensor.compile=True compiles is one piece: use another schedule, or tensor.compile=False"
        )


def _check_pipeline(config: ThreeDConfig) -> None:
    """Refuse what the schedule can't run."""
    pp, num_microbatches = config.pipeline_parallel_size, config.num_microbatches
    schedule, per_rank = config.pipeline.schedule, config.pipeline.num_local_stages
    _check_cut_points(config.pipeline.partition, len(config.pipeline.stage_ranks(pp)))
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
