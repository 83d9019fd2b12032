"""Models of transformers, small ones: architectures, ways to attend, to mix experts and to share weights."""

from __future__ import annotations

from functools import partial

from tests import architectures as a
from tests.hugging_face import (
    CLM,
    IMAGES,
    MLM,
    S2S,
    hf_job,
    hugging_face,
    image_settings,
    recomputed,
    seq2seq_settings,
    small_job,
    text_settings,
)
from tests.law.models.row import COUPLED, LOOPS, NORMS, ON_SHARDS, Model

TEXT = text_settings(width=32, num_heads=4, num_layers=2)
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
ONE_KEY = {**GROUPED, "num_key_value_heads": 1}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
"""Multi-head latent attention, and a mixture of experts in the second layer, whose narrow experts' second weights are
columns: gathering their inputs and the sum of their outputs sends less than reducing the outputs of each expert."""
SEQ2SEQ = seq2seq_settings(width=32, num_heads=4)
IMAGE = image_settings(width=32, num_heads=4, num_layers=2)
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "num_labels": a.NUM_CLASSES}
AUDIO = {
    "num_hidden_layers": 2,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": a.NUM_CLASSES,
}

MODELS = {
    "llama": Model(job=hf_job("LlamaConfig", CLM, **GROUPED)),
    "llama-tied": Model(
        job=hf_job("LlamaConfig", CLM, **{**GROUPED, "num_key_value_heads": 4}, tie_word_embeddings=True)
    ),
    "llama-one-kv-head": Model(job=hf_job("LlamaConfig", CLM, **ONE_KEY), families=ON_SHARDS),
    "qwen3": Model(job=hf_job("Qwen3Config", CLM, **GROUPED), alike="llama"),
    "phi": Model(job=hf_job("PhiConfig", CLM, **TEXT), families=ON_SHARDS),
    "phi3": Model(job=hf_job("Phi3Config", CLM, **TEXT), families=ON_SHARDS),
    "gpt2": Model(
        job=hf_job(
            "GPT2Config", CLM, vocab_size=a.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=64
        )
    ),
    "mixtral": Model(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="batched_mm")
    ),
    "mixtral-grouped": Model(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="grouped_mm"),
        families=ON_SHARDS,
    ),
    "qwen3-moe": Model(
        job=hf_job("Qwen3MoeConfig", CLM, **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
        families=ON_SHARDS,
    ),
    "llama4": Model(
        job=hf_job(
            "Llama4TextConfig",
            CLM,
            **GROUPED,
            num_local_experts=4,
            intermediate_size_mlp=64,
            interleave_moe_layer_step=1,
        )
    ),
    "gpt-oss": Model(
        job=hf_job("GptOssConfig", CLM, **GROUPED, num_local_experts=4, num_experts_per_tok=2), families=ON_SHARDS
    ),
    "bert": Model(job=hf_job("BertConfig", MLM, a.masked_text, **TEXT)),
    "deberta-v2": Model(
        job=hf_job(
            "DebertaV2Config", MLM, **TEXT, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]
        )
    ),
    "t5": Model(
        job=hf_job(
            "T5Config",
            S2S,
            vocab_size=a.VOCABULARY,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ),
    "bart": Model(job=hf_job("BartConfig", S2S, **SEQ2SEQ, forced_eos_token_id=2)),
    "deepseek-v3": Model(job=hf_job("DeepseekV3Config", CLM, **LATENT)),
    "olmo2": Model(job=hf_job("Olmo2Config", CLM, **{**TEXT, "num_key_value_heads": 2}), families=ON_SHARDS),
    "swin": Model(
        job=hf_job(
            "SwinConfig",
            IMAGES,
            a.images,
            image_size=16,
            patch_size=2,
            embed_dim=16,
            depths=[2, 2],
            num_heads=[2, 4],
            window_size=4,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "vit": Model(job=hf_job("ViTConfig", IMAGES, a.images, **IMAGE)),
    "clip": Model(
        job=hf_job(
            "CLIPConfig",
            "AutoModel",
            a.images_with_text,
            arguments={"return_loss": True},
            text_config={**TEXT, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
            vision_config={**IMAGE, "projection_dim": 8},
            projection_dim=8,
        ),
        traits=COUPLED,
    ),
    "resnet": Model(job=hf_job("ResNetConfig", IMAGES, a.images, **{**RESNET, "layer_type": "basic"}), traits=NORMS),
    "convnext": Model(
        job=hf_job(
            "ConvNextConfig",
            IMAGES,
            a.images,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            layer_scale_init_value=1.0,  # 1e-6 lets hardly any gradient through
            num_stages=2,
            patch_size=2,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "efficientnet": Model(
        job=hf_job(
            "EfficientNetConfig",
            IMAGES,
            partial(a.images, size=64),
            image_size=64,
            width_coefficient=0.25,
            depth_coefficient=0.3,
            hidden_dim=320,
            initializer_range=0.2,
            dropout_rate=0.0,
            drop_connect_rate=0.0,
            num_labels=a.NUM_CLASSES,
        ),
        traits=NORMS,
    ),
    "segformer": Model(
        job=hf_job(
            "SegformerConfig",
            "AutoModelForSemanticSegmentation",
            a.segmented_images,
            num_encoder_blocks=2,
            depths=[2, 2],
            sr_ratios=[2, 1],
            hidden_sizes=[16, 32],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[4, 4],
            decoder_hidden_size=8,
            initializer_range=0.2,  # with less, hardly any gradient reaches the blocks
            num_labels=2,
            hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
        ),
        traits=NORMS,
    ),
    "llama-recomputed": Model(
        job=small_job(partial(recomputed, "LlamaConfig", CLM, use_reentrant=False, **GROUPED), a.text)
    ),
    "mixtral-balanced": Model(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, output_router_logits=True), traits=COUPLED
    ),
    "gemma3n": Model(
        job=hf_job(
            "Gemma3nTextConfig",
            CLM,
            **{**GROUPED, "num_hidden_layers": 4},
            vocab_size_per_layer_input=a.VOCABULARY,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=8,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
            altup_num_inputs=2,
        )
    ),
    "mamba": Model(
        job=hf_job("MambaConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=16, num_hidden_layers=3, state_size=4),
        skips=LOOPS,
    ),
    "albert": Model(job=hf_job("AlbertConfig", MLM, **TEXT, embedding_size=8)),
    "whisper": Model(
        job=hf_job(
            "WhisperConfig",
            "AutoModelForSpeechSeq2Seq",
            a.spectrograms,
            **{**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        )
    ),
    "wav2vec2": Model(
        job=hf_job(
            "Wav2Vec2Config",
            "AutoModelForAudioClassification",
            a.waveforms,
            **AUDIO,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=32,
        )
    ),
    "batch-encoding": Model(
        job=small_job(partial(hugging_face, "BertConfig", MLM, **TEXT), a.text, collate=a.collate_encoding)
    ),
}
