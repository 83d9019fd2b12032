"""DeepSpeed's config as input: what each of its keys becomes, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_3d import ConfigError, ThreeDStrategy
from lightning_3d.config.deepspeed import read_deepspeed
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET
from tests.workers import WorkerPools

_ZERO_0 = {"zero": {"stage": 0}}

_MEANING: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    ({}, _ZERO_0, {}),  # DeepSpeed's stage
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, {"zero": {"stage": 2}}, {}),
    ({"zero_optimization": {"stage": "auto"}}, _ZERO_0, {}),
    ({"zero_optimization": {"stage": 1, "mics_shard_size": 8}}, {"zero": {"stage": 1, "shard_size": 8}}, {}),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/disk"}}},
        {"zero": {"stage": 3, "offload_params": "/disk", "offload_optimizer": "/disk"}},
        {},
    ),
    ({"zero_optimization": {"cpu_offload": True}}, {"zero": {"offload_optimizer": "cpu", "stage": 0}}, {}),
    ({"communication_data_type": "bf16"}, {"zero": {"communication_dtype": "bfloat16", "stage": 0}}, {}),
    (
        {"fp16": {"enabled": True, "loss_scale": 0}},
        {**_ZERO_0, "precision": {"initial_scale_power": 16, "loss_scale_window": 1000}},
        {"precision": "16-true"},
    ),
    (
        {"fp16": {"enabled": True, "loss_scale": 128}},
        {**_ZERO_0, "precision": {"loss_scale": 128.0}},
        {"precision": "16-true"},
    ),
    ({"fp16": {"enabled": False}, "bf16": {"enabled": True}}, _ZERO_0, {"precision": "bf16-true"}),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {**_ZERO_0, "precision": {"updates": "direct"}},
        {"precision": "bf16-true"},
    ),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, _ZERO_0, {"precision": "16-mixed"}),
    ({"gradient_clipping": 1}, _ZERO_0, {"gradient_clip_val": 1.0}),
    ({"gradient_accumulation_steps": 4}, _ZERO_0, {"accumulate_grad_batches": 4}),
    (
        {"gradient_accumulation_steps": 4, "pipeline": {"stages": 2, "partition": "best"}},
        {**_ZERO_0, "pipeline_parallel_size": 2, "pipeline": {"partition": "auto", "num_microbatches": 4}},
        {},
    ),
    ({"tensor_parallel": {"autotp_size": 4}}, {**_ZERO_0, "tensor_parallel_size": 4}, {}),
    (
        {"activation_checkpointing": {"partition_activations": True}, "tensor_parallel": {"autotp_size": 2}},
        {**_ZERO_0, "tensor_parallel_size": 2, "activations": {"recompute": "full", "partition": True}},
        {},
    ),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        {**_ZERO_0, "activations": {"recompute": "full", "offload": True}},
        {},
    ),
    (
        {"pipeline": {"activation_checkpoint_interval": 2}},
        {**_ZERO_0, "activations": {"recompute": "full", "every": 2}},
        {},
    ),
]  # a config, the arguments of the strategy, and of the Trainer

_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, r"AdamW\(lr=0.1\).*leave_out=\['optimizer'\]"),
    ({"scheduler": {"type": "WarmupLR"}}, "configure_optimizers"),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "would be rounded"),
    ({"gradient_allreduce_op": "sum"}, "averaged"),
    ({"compression_training": {"weight_quantization": {}}}, "would change the training"),
    ({"curriculum_learning": {"enabled": True}}, "would change the training"),
    ({"amp": {"enabled": True}}, "16-mixed"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enable one"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "no nvme_path"),
    ({"zero_optimisation": {"stage": 2}}, "no key of DeepSpeed"),
]


@pytest.mark.parametrize(("config", "strategy", "trainer"), _MEANING, ids=[str(row[0])[:60] for row in _MEANING])
def test_keys_with_a_meaning(config: dict[str, Any], strategy: dict[str, Any], trainer: dict[str, Any]) -> None:
    read = read_deepspeed(config)
    assert (read.strategy, read.trainer) == (strategy, trainer)
    ThreeDStrategy.from_deepspeed(config)  # which checks them


@pytest.mark.parametrize(("config", "reason"), _REFUSED, ids=[str(row[0])[:60] for row in _REFUSED])
def test_keys_that_would_change_the_training_are_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_deepspeed(config)


def test_keys_without_an_effect_are_told() -> None:
    config = {
        "optimizer": {"type": "Adam"},
        "steps_per_print": 10,
        "zero_optimization": {"overlap_comm": True, "round_robin_gradients": False},
        "curriculum_learning": {"enabled": False},
    }
    read = read_deepspeed(config, leave_out="optimizer")
    assert list(read.left_out) == ["optimizer", "steps_per_print", "zero_optimization.overlap_comm"]
    assert "left out: steps_per_print, which says" in str(read)
    with pytest.raises(ConfigError, match="leave_out names 'scheduler'"):
        read_deepspeed(config, leave_out=["scheduler"])


_SIZES = {"gradient_clipping": 0.5, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}


def _fit(path: Path, num_steps: int, **arguments: Any) -> str:
    """The stage of a run that the file's settings fit, or why they don't."""
    path.write_text(json.dumps({**_SIZES, "gradient_accumulation_steps": num_steps}))
    strategy = ThreeDStrategy.from_deepspeed(path)
    batches = loader(features(16), global_batch_size=4)
    settings = {**QUIET, "enable_checkpointing": False, "accumulate_grad_batches": num_steps, **arguments}
    try:
        L.Trainer(devices=1, strategy=strategy, max_steps=1, **settings).fit(TinyMLP(), batches, batches)
    except ConfigError as error:
        return str(error)
    return f"ZeRO {strategy.config.zero.stage}"


@pytest.mark.parametrize(
    ("num_steps", "arguments", "outcome"),
    [
        (2, {"gradient_clip_val": 0.5}, "ZeRO 0"),
        (2, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "gradient_clip_algorithm='value'"),
        (2, {}, "Trainer(gradient_clip_val=0.5)"),
        (3, {"gradient_clip_val": 0.5}, "4 x gradient_accumulation_steps=3 x 1 replicas are 12"),
    ],
)
def test_a_trainer_has_to_agree_with_the_file(
    workers: WorkerPools, tmp_path: Path, num_steps: int, arguments: dict[str, Any], outcome: str
) -> None:
    assert outcome in workers(1).run(partial(_fit, tmp_path / "ds_config.json", num_steps, **arguments))[0]
