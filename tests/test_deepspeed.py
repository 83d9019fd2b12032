"""DeepSpeed's config as input: what each of its keys becomes, and what is refused."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from lightning_3d import ConfigError, ThreeDStrategy
from lightning_3d.config.deepspeed import read_deepspeed
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET
from tests.workers import WorkerError, WorkerPools

# The keys of https://www.deepspeed.ai/docs/config-json and of the classes in deepspeed/runtime that read it (v0.19).
_TOP = """
compress_communication
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation optimizer
scheduler communication_data_type gradient_allreduce_op prescale_gradients gradient_predivide_factor sparse_gradients
amp gradient_clipping aio expert_parallel steps_per_print wall_clock_breakdown dump_state autotuning flops_profiler
sparse_attention data_efficiency curriculum_learning tensorboard wandb comet csv_monitor elasticity comms_logger
compression_training hybrid_engine progressive_layer_drop eigenvalue memory_breakdown graph_harvesting compile nebula
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather dataloader_drop_last log_level
use_data_before_expert_parallelism seq_parallel_communication_data_type quantize_training
weight_quantization vocabulary_size data_parallel_size sequence_parallel_size timers datastates_ckpt
"""
_SECTIONS = {
    "fp16": "enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis"
    " min_loss_scale fp16_master_weights_and_grads",
    "bf16": "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "zero_optimization": "stage contiguous_gradients reduce_scatter reduce_bucket_size allgather_partitions"
    " use_multi_rank_bucket_allreduce allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint"
    " zenflow sub_group_size cpu_offload cpu_offload_param cpu_offload_use_pin_memory stage3_prefetch_bucket_size"
    " stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters grad_hooks"
    " stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold"
    " stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential stage3_gather_fp16_weights_on_model_save"
    " ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights"
    " zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size"
    " mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply"
    " log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module"
    " prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters"
    " max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold allgather_sequential"
    " use_all_reduce_for_fetch_params",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "zero_optimization.offload_optimizer": "device nvme_path buffer_count pin_memory pipeline_read pipeline_write"
    " fast_init ratio super_offload cpuadam_cores_perc",
    "tensor_parallel": "autotp_size tp_size tp_overlap_comm preset_model partition_config dtype tp tensor_parallel",
    "activation_checkpointing": "partition_activations cpu_checkpointing contiguous_memory_optimization"
    " number_checkpoints synchronize_checkpoint_boundary profile",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "pipeline": "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
}
_PUBLISHED = {*_TOP.split(), *(f"{section}.{key}" for section, keys in _SECTIONS.items() for key in keys.split())}

_VALUES: dict[str, Any] = {  # of keys that are plausible with another value than True
    **dict.fromkeys(("zero_optimization.offload_param.device", "zero_optimization.offload_optimizer.device"), "cpu"),
    **dict.fromkeys(("communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"), "fp32"),
    **dict.fromkeys(
        (
            "tensor_parallel.autotp_size",
            "tensor_parallel.tp_size",
            "pipeline.stages",
            "zero_optimization.mics_shard_size",
        ),
        2,
    ),
    **{"optimizer": {"type": "Adam"}, "scheduler": {"type": "WarmupLR"}, "sequence_parallel_size": 2},
    **{"gradient_allreduce_op": "sum", "managed_gradient_accumulation": False, "pipeline.partition": "parameters"},
}

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
    (
        {"communication_data_type": "fp16", "compress_communication": True},
        {"zero": {"communication_dtype": "float16", "stage": 0}},
        {},
    ),
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
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {**_ZERO_0, "precision": {"updates": "direct"}},
        {"precision": "bf16-true"},
    ),
    ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, _ZERO_0, {"precision": "16-mixed"}),
    ({"gradient_clipping": 1}, _ZERO_0, {"gradient_clip_val": 1.0}),
    ({"fp16": {"enabled": False, "hysteresis": 4}}, _ZERO_0, {}),
    ({"gradient_accumulation_steps": 4}, _ZERO_0, {"accumulate_grad_batches": 4}),
    (
        {"gradient_accumulation_steps": 4, "pipeline": {"stages": 2, "partition": "best"}},
        {**_ZERO_0, "pipeline_parallel_size": 2, "pipeline": {"partition": "auto", "num_microbatches": 4}},
        {},
    ),
    ({"tensor_parallel": {"autotp_size": 4}}, {**_ZERO_0, "tensor_parallel_size": 4}, {}),
    ({"tensor_parallel": {"tp_size": 4}}, {**_ZERO_0, "tensor_parallel_size": 4}, {}),
    ({"sequence_parallel_size": 4}, {**_ZERO_0, "context_parallel_size": 4}, {}),
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
    ({"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}, r"OneBitAdam\(lr=0.1\).*leave_out=\['optimizer'\]"),
    ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "params.max_grad_norm=1, not known"),
    ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "params.bias_correction=False, not known"),
    ({"scheduler": {"type": "OneCycle"}}, "configure_optimizers"),
    ({"scheduler": {"type": "WarmupDecayLR"}}, "without total_num_steps"),
    ({"compress_communication": True}, "no communication_data_type"),
    ({"tensor_parallel": {"autotp_size": 2, "tp_size": 4}}, "another key says tensor_parallel_size=2"),
    ({"zero_optimization": {"zero_quantized_gradients": True}}, "would be rounded"),
    ({"gradient_allreduce_op": "sum"}, "averaged"),
    ({"compression_training": {"weight_quantization": {}}}, "would change the training"),
    ({"curriculum_learning": {"enabled": True}}, "would change the training"),
    ({"amp": {"enabled": True}}, "16-mixed"),
    ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "Set both"),
    ({"fp16": {"enabled": True, "hysteresis": 4}}, "halves at each overflow"),
    ({"fp16": {"enabled": True, "consecutive_hysteresis": True}}, "halves at each overflow"),
    ({"fp16": {"enabled": True, "min_loss_scale": 16}}, "it is 1"),
    ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "enable one"),
    ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, "no nvme_path"),
    ({"zero_optimisation": {"stage": 2}}, "no key of DeepSpeed"),
]


@pytest.mark.parametrize("key", sorted(_PUBLISHED))
def test_every_published_key_is_told(key: str) -> None:
    config = _VALUES.get(key, True)
    for name in reversed(key.split(".")):
        config = {name: config}
    try:
        read = read_deepspeed(config)
    except ConfigError as error:
        told = str(error)
    else:
        told = key if read != read_deepspeed({}) else ""
        assert not read.left_out.keys() - {key}
    assert key in told
    assert "no key of DeepSpeed" not in told


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
    assert "steps_per_print is left out: it says" in str(read)
    assert "gradient_clipping is not set" in str(read)
    assert "gradient_clipping is not set" not in str(read_deepspeed({"gradient_clipping": 0}))
    with pytest.raises(ConfigError, match="leave_out names 'scheduler'"):
        read_deepspeed(config, leave_out=["scheduler"])


_SIZES = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
_DTYPE = {"data_types": {"grad_accum_dtype": "fp32"}}
_DEFAULTS = {"enabled": True, "loss_scale": 0, "hysteresis": 2, "consecutive_hysteresis": False, "min_loss_scale": 1}


@pytest.mark.parametrize(
    ("config", "trainer", "reason"),
    [
        (_SIZES, {"accumulate_grad_batches": 4}, None),
        (
            _SIZES,
            {"accumulate_grad_batches": 3},
            "train_batch_size=8.*gpu=2 x 3 steps of accumulation x 1 replicas are 6",
        ),
        ({**_SIZES, "gradient_accumulation_steps": 4, "pipeline": {"stages": 2}}, {}, None),
        ({"gradient_clipping": 0}, {}, None),
        ({"gradient_clipping": 0}, {"gradient_clip_algorithm": "value"}, None),
        ({"gradient_clipping": 0}, {"gradient_clip_val": 0.5}, "gradient_clip_val=0.0, but the Trainer has 0.5"),
        (_DTYPE, {}, None),
        (_DTYPE, {"precision": "bf16-true"}, "grad_accum_dtype='float32', but .* are bfloat16 .*leave_out="),
        ({"data_types": {"param_dtype": "bf16"}, "bf16": {"enabled": True}}, {"precision": "bf16-true"}, None),
        ({"fp16": _DEFAULTS}, {"precision": "16-true"}, None),
    ],
)
def test_a_trainer_does_what_the_config_says(
    config: dict[str, Any], trainer: dict[str, Any], reason: str | None
) -> None:
    has = {"precision": "32-true", "gradient_clip_val": None, "gradient_clip_algorithm": None}
    with nullcontext() if reason is None else pytest.raises(ConfigError, match=reason):
        read_deepspeed(config).check(1, **{**has, "accumulate_grad_batches": 1, **trainer})


_FILE = {"gradient_clipping": 0.5, "train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}


def _fit(path: Path, num_steps: int, **arguments: Any) -> str:
    """The stage of a run that the file's settings fit, or why they don't."""
    path.write_text(json.dumps({**_FILE, "gradient_accumulation_steps": num_steps}))
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
        (3, {"gradient_clip_val": 0.5}, "4 x 3 steps of accumulation x 1 replicas are 12"),
    ],
)
def test_a_trainer_has_to_agree_with_the_file(
    workers: WorkerPools, tmp_path: Path, num_steps: int, arguments: dict[str, Any], outcome: str
) -> None:
    assert outcome in workers(1).run(partial(_fit, tmp_path / "ds_config.json", num_steps, **arguments))[0]


class _Bare(TinyMLP):
    """Leaves the optimizer to the config."""

    configure_optimizers = L.LightningModule.configure_optimizers

    def on_train_batch_start(self, *args: Any) -> None:
        (optimizer,) = self.trainer.optimizers
        self.rates = [*getattr(self, "rates", []), optimizer.param_groups[0]["lr"]]


def _built(module: type[L.LightningModule], sections: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    """The learning rates of six steps, and the optimizer with its settings."""
    trained = module()
    strategy = ThreeDStrategy.from_deepspeed(sections)
    trainer = L.Trainer(devices=1, strategy=strategy, max_steps=6, **{**QUIET, "enable_checkpointing": False})
    batches = loader(features(24), global_batch_size=4)
    trainer.fit(trained, batches, batches)
    (optimizer,) = trainer.optimizers
    assert "configure_optimizers" not in vars(trained)
    return getattr(trained, "rates", []), {"type": type(optimizer).__name__, **optimizer.defaults}


_ADAM = {"type": "Adam", "params": {"lr": 0.5, "betas": [0.8, 0.9], "eps": "auto"}}
_LINEAR = {"warmup_num_steps": 3, "warmup_type": "linear", "total_num_steps": 5}


@pytest.mark.parametrize(
    ("scheduler", "rates"),  # by hand, by the formulas of deepspeed/runtime/lr_schedules.py
    [
        (None, [0.5] * 6),
        (("WarmupLR", {"warmup_num_steps": 4}), [0, 0, 0.25, 0.5 * 0.7924813, 0.5, 0.5]),
        (("WarmupDecayLR", {**_LINEAR, "warmup_min_lr": 0.1, "warmup_max_lr": 0.4}), [0.1, 0.1, 0.2, 0.3, 0.4, 0.25]),
        (("WarmupCosineLR", {**_LINEAR, "warmup_min_ratio": 0.4, "cos_min_ratio": 0.2}), [0, 0.2, 0.3, 0.4, 0.3, 0.1]),
    ],
)
def test_optimizers_and_schedulers_are_those_that_deepspeed_builds(
    workers: WorkerPools, scheduler: tuple[str, dict[str, Any]] | None, rates: list[float]
) -> None:
    sections = {"optimizer": _ADAM}
    if scheduler is not None:
        sections["scheduler"] = {"type": scheduler[0], "params": scheduler[1]}
    ((found, optimizer),) = workers(1).run(_built, _Bare, sections)
    assert found == pytest.approx(rates)
    expected = {"type": "AdamW", "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0}
    assert optimizer.items() >= expected.items()


def test_a_module_keeps_the_optimizer_of_its_own(workers: WorkerPools) -> None:
    own = workers(1).run(_built, TinyMLP, {})
    assert workers(1).run(_built, TinyMLP, {"optimizer": _ADAM}) == own
    with pytest.raises(WorkerError, match=r"scheduler, but TinyMLP has a configure_optimizers .*leave_out"):
        workers(1).run(_built, TinyMLP, {"optimizer": _ADAM, "scheduler": {"type": "WarmupLR"}})
    with pytest.raises(WorkerError, match="a scheduler and no optimizer, and _Bare no configure_optimizers"):
        workers(1).run(_built, _Bare, {"scheduler": {"type": "WarmupLR"}})
