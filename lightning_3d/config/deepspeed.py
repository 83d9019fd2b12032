"""DeepSpeed's JSON config in the terms of this package: what each key becomes, or why it has no effect or is refused.

    means the same here          an argument of `ThreeDStrategy`, or of Lightning's Trainer
    can't change any number      left out, with the reason: sizes of DeepSpeed's buffers, what it prints, ...
    what DeepSpeed builds        built, where the module has no configure_optimizers: Adam, AdamW, SGD, warm-ups
    would change the training    refused: other optimizers and schedulers, compression, curricula, ...

``"auto"``, as in files for transformers, is as if the key was not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_3d.config.deepspeed_keys import (
    BUILT,
    DISABLED,
    DTYPES,
    KEYS,
    LEFT_OUT,
    PRECISIONS,
    REFUSED,
    SECTIONS,
    SETTINGS,
    dtype_name,
)
from lightning_3d.config.deepspeed_optimizers import checked
from lightning_3d.errors import ConfigError

_NOTHING = (False, 0, "none")
"""Values by which keys ask for nothing."""

_PARAMETERS = {"16-true": "float16", "bf16-true": "bfloat16", "64-true": "float64"}
"""A Trainer's precision -> the dtype of parameters, gradients and buffers, where it is not float32."""


@dataclass(kw_only=True)
class FromDeepSpeed:
    """A DeepSpeed config, read."""

    strategy: dict[str, Any] = field(default_factory=dict)
    """Arguments of `ThreeDStrategy`."""

    trainer: dict[str, Any] = field(default_factory=dict)
    """Arguments that the Trainer has to have: ``precision``, ``accumulate_grad_batches``, ``gradient_clip_val``."""

    batch_size: int | None = None
    """Samples of all replicas in a step of the optimizer."""

    micro_batch_size: int | None = None
    """Samples of one replica in a microbatch."""

    dtypes: dict[str, str] = field(default_factory=dict)
    """Key -> the dtype that it asks for, which has to be that of the parameters."""

    built: dict[str, tuple[str, dict[str, object]]] = field(default_factory=dict)
    """``optimizer`` and ``scheduler`` -> their types and all of their parameters."""

    left_out: dict[str, str] = field(default_factory=dict)
    """Key -> why it has no effect."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of the batch that a DataLoader gives: more than one in a pipeline."""
        return int(self.strategy.get("pipeline", {}).get("num_microbatches", 1))

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"ThreeDStrategy({_arguments(self.strategy)})"
        yield f"Trainer({_arguments(self.trainer)})"
        if self.micro_batch_size is not None:
            yield f"DataLoader(batch_size={self.micro_batch_size * self.num_microbatches})"
        for key, (kind, parameters) in self.built.items():
            yield f"{key} {kind}({_arguments(parameters)}), where the module has no configure_optimizers"
        if not {"gradient_clip_val", "gradient_clipping"} & {*self.trainer, *self.left_out}:
            yield "gradient_clipping is not set: DeepSpeed 0.19.4 and newer clip at 1.0 then; here the Trainer decides"
        yield from (f"{key} is left out: {why}" for key, why in self.left_out.items())

    def check(self, num_replicas: int, **trainer: Any) -> None:
        """Refuse a run that is not the one of the config.

        Args:
            num_replicas: Of the model.
            trainer: The Trainer's arguments of the names that `trainer` may have, and ``gradient_clip_algorithm``.

        Raises:
            ConfigError: the Trainer does otherwise, or sizes of batches contradict each other.
        """
        for name, wanted in self.trainer.items():
            if (trainer[name] or 0) != wanted:
                raise ConfigError(
                    f"the DeepSpeed config asks for {name}={wanted!r}, but the Trainer has {trainer[name]!r}: set"
                    f" Trainer({name}={wanted!r}), or change the config"
                )
        if self.trainer.get("gradient_clip_val") and trainer["gradient_clip_algorithm"] == "value":
            raise ConfigError(
                "the DeepSpeed config clips the norm of gradients, but the Trainer has gradient_clip_algorithm='value':"
                " leave it out"
            )
        held = _PARAMETERS.get(trainer["precision"], "float32")
        for key, wanted in self.dtypes.items():
            if wanted != held:
                raise ConfigError(
                    f"the DeepSpeed config has {key}={wanted!r}, but parameters, gradients and buffers are {held} with"
                    f" precision={trainer['precision']!r}: change one of them, or say leave_out=[{key!r}]"
                )
        steps = self.num_microbatches * trainer["accumulate_grad_batches"]
        if self.batch_size is None or self.micro_batch_size is None:
            return
        if self.batch_size != (found := self.micro_batch_size * steps * num_replicas):
            raise ConfigError(
                f"the DeepSpeed config has train_batch_size={self.batch_size}, but"
                f" train_micro_batch_size_per_gpu={self.micro_batch_size} x {steps} steps of accumulation x"
                f" {num_replicas} replicas are {found}: change one of them, or the Trainer's accumulate_grad_batches"
            )


def _arguments(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def read_deepspeed(
    config: str | os.PathLike[str] | Mapping[str, object],
    *,
    pipeline_parallel_size: int | None = None,
    leave_out: Collection[str] = (),
) -> FromDeepSpeed:
    """Read a DeepSpeed config.

    Args:
        config: Path of a JSON file, or what it holds.
        pipeline_parallel_size: The number of pipeline stages; that of the config if None.
        leave_out: Keys or sections that code takes the place of, such as ``"optimizer"``.

    Raises:
        ConfigError: the file can't be read, a key is not known, or asks for what would change the training and is not
            done here.
    """
    keys = {key: value for key, value in _flat(_load(config)) if value is not None and value != "auto"}
    read = FromDeepSpeed()
    for name in (leave_out,) if isinstance(leave_out, str) else leave_out:
        named = {key for key in keys if key == name or key.startswith(f"{name}.")}
        if not named:
            raise ConfigError(f"leave_out names {name!r}, which the DeepSpeed config does not set")
        read.left_out[name] = "code does it"
        keys = {key: value for key, value in keys.items() if key not in named}
    for key, value in keys.items():
        section = key.partition(".")[0]
        if key in KEYS and section in PRECISIONS and not keys.get(f"{section}.enabled"):
            if value not in _NOTHING:
                read.left_out[key] = f"{section}.enabled is not true"
        else:
            _take(read, key, value)
    if pipeline_parallel_size is not None:
        read.strategy["pipeline_parallel_size"] = pipeline_parallel_size
    _offload(read, keys)
    _precision(read, keys)
    _batches(read, keys)
    _activations(read, keys)
    return read


def _load(config: str | os.PathLike[str] | Mapping[str, object]) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    try:
        loaded = json.loads(Path(config).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the DeepSpeed config {os.fspath(config)}: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"the DeepSpeed config {os.fspath(config)} holds no JSON object")
    return loaded


def _flat(given: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in given.items():
        if (key := prefix + name) in SECTIONS and isinstance(value, Mapping):
            yield from _flat(value, f"{key}.")
        else:
            yield key, value


def _take(read: FromDeepSpeed, key: str, value: object) -> None:
    """A key that needs no other to be understood."""
    asked = f"the DeepSpeed config has {key}={value!r}"
    if key not in KEYS:
        raise ConfigError(f"{asked}, which is no key of DeepSpeed that is known")
    if key in BUILT:
        read.built[key] = checked(key, value)
    if key in DISABLED and (value.get("enabled", True) if isinstance(value, Mapping) else value):
        raise ConfigError(f"{asked}: {DISABLED[key]}. Leave it out")
    if key in REFUSED and value not in REFUSED[key][0]:
        raise ConfigError(f"{asked}: {REFUSED[key][1]}. Leave it out")
    if key in LEFT_OUT and value not in _NOTHING:
        read.left_out[key] = LEFT_OUT[key]
    if key in DTYPES:
        read.dtypes[key] = dtype_name(value)
    if key in SETTINGS:
        setting, convert = SETTINGS[key]
        if read.strategy.get(setting, convert(value)) != convert(value):
            raise ConfigError(
                f"{asked}, but another key says {setting}={read.strategy[setting]!r}: leave one of them out"
            )
        _set(read, setting, convert(value))


def _set(read: FromDeepSpeed, setting: str, value: object) -> None:
    section, _, name = setting.rpartition(".")
    (read.strategy.setdefault(section, {}) if section else read.strategy)[name] = value


def _offload(read: FromDeepSpeed, keys: Mapping[str, Any]) -> None:
    zero = read.strategy.setdefault("zero", {})
    zero.setdefault("stage", 0)
    for name, old, setting in (
        ("offload_optimizer", "cpu_offload", "offload_optimizer"),
        ("offload_param", "cpu_offload_param", "offload_params"),
    ):
        section = f"zero_optimization.{name}"
        place = "cpu" if keys.get(f"zero_optimization.{old}") else keys.get(f"{section}.device", "none")
        path = keys.get(f"{section}.nvme_path")
        if place != "nvme" and path is not None:
            read.left_out[f"{section}.nvme_path"] = "the device is not nvme"
        if place == "nvme" and (place := path) is None:
            raise ConfigError(f"the DeepSpeed config has {section}.device='nvme' and no nvme_path: name a directory")
        if place != "none":
            zero[setting] = place
    if "offload_params" in zero:  # which are stepped where they lie
        zero.setdefault("offload_optimizer", zero["offload_params"])


def _precision(read: FromDeepSpeed, keys: Mapping[str, Any]) -> None:
    chosen = [name for name in ("fp16", "bf16", "bfloat16", "torch_autocast") if keys.get(f"{name}.enabled")]
    if len(chosen) > 1:
        raise ConfigError(f"the DeepSpeed config enables {' and '.join(chosen)}: enable one of them")
    if chosen == ["torch_autocast"]:
        is_half = str(keys.get("torch_autocast.dtype")) in ("float16", "fp16", "torch.float16")
        read.trainer["precision"] = "16-mixed" if is_half else "bf16-mixed"
    elif chosen == ["fp16"]:
        read.trainer["precision"] = "16-true"
        if scale := keys.get("fp16.loss_scale"):
            _set(read, "precision.loss_scale", float(scale))
        else:  # DeepSpeed's defaults
            _set(read, "precision.initial_scale_power", int(keys.get("fp16.initial_scale_power", 16)))
            _set(read, "precision.loss_scale_window", int(keys.get("fp16.loss_scale_window", 1000)))
    elif chosen:
        read.trainer["precision"] = "bf16-true"
        direct = bool(keys.get("bf16.bf16_master_weights_and_grads"))
        if direct != bool(keys.get("bf16.bf16_optimizer_states")):
            raise ConfigError(
                "the DeepSpeed config has one of bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states:"
                " weights that are stepped in bf16 have their states in bf16. Set both, or leave both out"
            )
        if direct:
            _set(read, "precision.updates", "direct")


def _batches(read: FromDeepSpeed, keys: Mapping[str, Any]) -> None:
    if keys.get("compress_communication") and "communication_data_type" not in keys:
        raise ConfigError(
            "the DeepSpeed config has compress_communication=True and no communication_data_type, which says in which"
            " dtype gradients are sent: add it"
        )
    read.batch_size, read.micro_batch_size = keys.get("train_batch_size"), keys.get("train_micro_batch_size_per_gpu")
    if "gradient_clipping" in keys:
        read.trainer["gradient_clip_val"] = float(keys["gradient_clipping"])
    if (steps := keys.get("gradient_accumulation_steps")) is None:
        return
    if read.strategy.get("pipeline_parallel_size", 1) > 1:  # a step of DeepSpeed's pipeline takes them all
        _set(read, "pipeline.num_microbatches", int(steps))
    else:
        read.trainer["accumulate_grad_batches"] = int(steps)


def _activations(read: FromDeepSpeed, keys: Mapping[str, Any]) -> None:
    cuts, offloads = (
        keys.get(f"activation_checkpointing.{name}") for name in ("partition_activations", "cpu_checkpointing")
    )
    every = int(keys.get("pipeline.activation_checkpoint_interval", 0))
    if cuts or offloads or every:
        _set(read, "activations.recompute", "full")
    if every > 1:
        _set(read, "activations.every", every)
    if cuts and read.strategy.get("tensor_parallel_size", 1) > 1:
        _set(read, "activations.partition", True)
    elif cuts:
        read.left_out["activation_checkpointing.partition_activations"] = "no tensor-parallel ranks share them"
    if offloads:
        _set(read, "activations.offload", True)
