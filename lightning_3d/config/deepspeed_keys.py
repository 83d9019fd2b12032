"""The keys of DeepSpeed's config, https://www.deepspeed.ai/docs/config-json, with their sections: what each becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

_DTYPES = {
    **{"fp32": "float32", "float": "float32", "fp16": "float16"},
    **{"half": "float16", "bf16": "bfloat16", "bfp16": "bfloat16"},
}


def dtype_name(value: object) -> str:
    """A dtype as DeepSpeed says it, in torch's word."""
    name = str(value).lower().removeprefix("torch.")
    return _DTYPES.get(name, name)


PRECISIONS = ("fp16", "bf16", "bfloat16", "torch_autocast")
"""Sections whose keys mean nothing until they are enabled."""

DTYPES = ("data_types.grad_accum_dtype", "data_types.param_dtype", "data_types.buffer_dtype")
"""Keys that may ask for nothing but the dtype of parameters."""

SETTINGS: Mapping[str, tuple[str, Callable[[Any], object]]] = {
    "communication_data_type": ("zero.communication_dtype", dtype_name),
    "zero_optimization.stage": ("zero.stage", int),
    "zero_optimization.mics_shard_size": ("zero.shard_size", lambda size: size if size > 1 else "auto"),
    "tensor_parallel.autotp_size": ("tensor_parallel_size", lambda size: max(1, int(size))),
    "tensor_parallel.tp_size": ("tensor_parallel_size", lambda size: max(1, int(size))),
    "sequence_parallel_size": ("context_parallel_size", int),
    "pipeline.stages": ("pipeline_parallel_size", int),
    "pipeline.partition": ("pipeline.partition", lambda method: {"best": "auto"}.get(method, method)),
}
"""Key -> a setting of the strategy, and how its value is said there."""

_TOGETHER = """
compress_communication
gradient_accumulation_steps gradient_clipping train_batch_size train_micro_batch_size_per_gpu
fp16.enabled fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window
bf16.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bfloat16.enabled
torch_autocast.enabled torch_autocast.dtype
zero_optimization.cpu_offload zero_optimization.cpu_offload_param
zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.nvme_path
zero_optimization.offload_param.device zero_optimization.offload_param.nvme_path
activation_checkpointing.partition_activations activation_checkpointing.cpu_checkpointing
pipeline.activation_checkpoint_interval
"""
TOGETHER = frozenset(_TOGETHER.split())
"""Keys of which several decide a setting."""

BUILT = ("optimizer", "scheduler")
"""Sections of what DeepSpeed builds."""

_HALVES = "the scale halves at each overflow, as torch.amp.GradScaler's"

_QUANTIZED = "what is sent would be rounded; zero.communication_dtype and zero.power_sgd_rank send less"

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "managed_gradient_accumulation": ((True,), "a Trainer counts the batches of a step"),
    "gradient_allreduce_op": (("mean",), "gradients of replicas are averaged, as under DDP"),
    "sparse_gradients": ((False,), "gradients of embeddings are dense"),
    "fp16.fp16_master_weights_and_grads": ((False,), "small updates of fp16 weights would be lost"),
    "fp16.hysteresis": ((1, 2), _HALVES),
    "fp16.consecutive_hysteresis": ((False,), _HALVES),
    "fp16.min_loss_scale": ((1,), "it is 1: an overflow there ends the training"),
    "zero_optimization.zero_quantized_weights": ((False,), _QUANTIZED),
    "zero_optimization.zero_quantized_gradients": ((False,), _QUANTIZED),
    "zero_optimization.zero_quantized_nontrainable_weights": ((False,), _QUANTIZED),
    "checkpoint.use_node_local_storage": ((False,), "a checkpoint folder is on a file system that all nodes share"),
}
"""Key -> the values that are possible, and why others are not."""

_DISABLED = {
    "it is apex's; use Trainer(precision='16-mixed')": "amp",
    "it would change the size of batches": "elasticity",
    "expert parallel is not built; tensor parallel shards experts": "expert_parallel",
    "gradients would be quantised": "zero_optimization: zeropp_loco_param",
    "it steps parameters late": "zero_optimization: zenflow",
    "it would change the training, and is not done here": """
        progressive_layer_drop eigenvalue sparse_attention quantize_training data_efficiency curriculum_learning
        compression_training weight_quantization hybrid_engine
    """,
}
"""Why what keys enable is refused -> the keys, a line of them for each section."""

_LEFT_OUT = {
    "it is about how DeepSpeed does it": """
        autotuning graph_harvesting compile disable_allgather
        bf16: immediate_grad_update check_grad_overflow
        pipeline: seed_layers pipe_partitioned grad_partitioned use_reentrant
    """,
    "it says what DeepSpeed prints; see the Trainer's loggers, callbacks and profiler": """
        steps_per_print dump_state memory_breakdown flops_profiler log_level comms_logger
        tensorboard wandb comet csv_monitor timers
    """,
    "gradients are divided by the replicas before their sum": "prescale_gradients gradient_predivide_factor",
    "any optimizer works": "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    "see checkpoint.async_save": "nebula datastates_ckpt",
    "it tunes DeepSpeed's own access to disks": "aio",
    "the callback Telemetry() tells how long each part of a step takes": "wall_clock_breakdown",
    "DeepSpeed only warns of sizes that tensor cores don't like": "vocabulary_size",
    "it is the number of ranks over those of a replica": "data_parallel_size",
    "there is no expert parallel": "use_data_before_expert_parallelism",
    "there is no sequence_parallel_size": "seq_parallel_communication_data_type",
    "it is the DataLoader's affair": "dataloader_drop_last",
    "inputs are cast with precision='16-true'": "fp16: auto_cast",
    "the scale halves at each overflow, as with 1; with 2 DeepSpeed skips one step more": "fp16: hysteresis",
    "it is always so here: an overflow at scale 1 ends the training": "fp16: min_loss_scale",
    "torch.autocast knows what is safe; see precision.keep_fp32": "torch_autocast: lower_precision_safe_modules",
    "it sizes a buffer of DeepSpeed's; see zero.bucket_size, zero.prefetch": """
        zero_optimization: allgather_bucket_size reduce_bucket_size sub_group_size
        zero_optimization: stage3_prefetch_bucket_size prefetch_bucket_size
    """,
    "it is always so here, or is about how DeepSpeed does it": """
        zero_optimization: allgather_partitions contiguous_gradients overlap_comm reduce_scatter round_robin_gradients
    """,
    "checkpoints of any layout load into any other; lightning-3d checkpoint convert gives weights alone": """
        zero_optimization: elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint
        zero_optimization: stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
        zero_optimization: stage3_gather_fp16_weights_on_model_save
    """,
    "a block's parameters are gathered and freed together; see zero.reshard_after_forward": """
        zero_optimization: stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
        zero_optimization: stage3_module_granularity_threshold stage3_param_persistence_threshold max_live_parameters
        zero_optimization: max_reuse_distance model_persistence_threshold module_granularity_threshold
        zero_optimization: param_persistence_threshold
    """,
    "it is about how DeepSpeed does it; zero.shard_size shares the state inside of nodes": """
        zero_optimization: cpu_offload_use_pin_memory enable_sanity_checks grad_hooks ignore_unused_parameters
        zero_optimization: leaf_module legacy_stage1 log_trace_cache_warnings memory_efficient_linear
        zero_optimization: mics_hierarchical_params_gather override_module_apply save_muon_momentum_buffer_in_memory
        zero_optimization: stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params allgather_sequential
        zero_optimization: use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zero_hpz_partition_size
    """,
    "it is about how DeepSpeed does it; see zero.offload_params": """
        zero_optimization.offload_param: pin_memory buffer_count buffer_size max_in_cpu
    """,
    "it is about how DeepSpeed does it; see zero.offload_optimizer, zero.offload_window": """
        zero_optimization.offload_optimizer: pin_memory buffer_count pipeline_read pipeline_write fast_init ratio
        zero_optimization.offload_optimizer: super_offload cpuadam_cores_perc
    """,
    "autotp_size or tp_size is the size for training": "tensor_parallel: tp tensor_parallel",
    "plans are found for any model, and proved; see tensor.plan": """
        tensor_parallel: dtype tp_overlap_comm injection_policy_tuple partition_config preset_model kernel_inject
        tensor_parallel: keep_module_on_host replace_with_kernel_inject
    """,
    "it is about how DeepSpeed does it; see activations.recompute": """
        activation_checkpointing: contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary
        activation_checkpointing: profile
    """,
    "checkpoints of any layout load into any other": """
        checkpoint: tag_validation load_universal parallel_write writer checkpoint_serialization
    """,
}
"""Why keys have no effect -> the keys, likewise."""


def _by_key(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for why, text in reasons.items():
        for line in text.splitlines():
            section, _, names = line.strip().rpartition(": ")
            yield from ((f"{section}.{name}" if section else name, why) for name in names.split())


LEFT_OUT = dict(_by_key(_LEFT_OUT))
"""Key -> why it has no effect."""

DISABLED = dict(_by_key(_DISABLED))
"""Key -> why what it enables is refused."""

KEYS = SETTINGS.keys() | TOGETHER | {*BUILT, *DTYPES} | LEFT_OUT.keys() | DISABLED.keys() | REFUSED.keys()
"""All that are known."""

SECTIONS = frozenset(key[:end] for key in KEYS for end, letter in enumerate(key) if letter == ".")
"""Sections of which each key is looked at."""
