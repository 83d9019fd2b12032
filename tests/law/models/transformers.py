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
from tests.law.models.row import COUPLED, IN_HALVES, LOOPS, NORMS, Model

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
    "llama-one-kv-head": Model(job=hf_job("LlamaConfig", CLM, **ONE_KEY)),
    "mistral": Model(job=hf_job("MistralConfig", CLM, **GROUPED, sliding_window=4), alike="llama"),
    "qwen2": Model(job=hf_job("Qwen2Config", CLM, **{**TEXT, "num_key_value_heads": 2}), alike="llama"),
    "qwen3": Model(job=hf_job("Qwen3Config", CLM, **GROUPED), alike="llama"),
    "gemma": Model(job=hf_job("GemmaConfig", CLM, **GROUPED), alike="llama"),
    "phi": Model(job=hf_job("PhiConfig", CLM, **TEXT)),
    "phi3": Model(job=hf_job("Phi3Config", CLM, **TEXT), alike="llama"),
    "opt": Model(job=hf_job("OPTConfig", CLM, **{**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}), alike="gpt2"),
    "bloom": Model(
        job=hf_job("BloomConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=32, n_layer=2, n_head=4), alike="gpt2"
    ),
    "gpt2": Model(
        job=hf_job(
            "GPT2Config", CLM, vocab_size=a.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=64
        )
    ),
    "gpt-neox": Model(job=hf_job("GPTNeoXConfig", CLM, **TEXT), alike="phi"),
    "falcon": Model(job=hf_job("FalconConfig", CLM, **TEXT, multi_query=False), alike="phi"),
    "mixtral": Model(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="batched_mm")
    ),
    "mixtral-grouped": Model(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="grouped_mm")
    ),
    "mixtral-eager": Model(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="eager"),
        alike="mixtral",
    ),
    "qwen3-moe": Model(
        job=hf_job("Qwen3MoeConfig", CLM, **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    ),
    "olmoe": Model(job=hf_job("OlmoeConfig", CLM, **TEXT, num_experts=4, num_experts_per_tok=2), alike="mixtral"),
    "qwen2-moe": Model(
        job=hf_job(
            "Qwen2MoeConfig",
            CLM,
            **GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        alike="qwen3-moe",
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
    "gpt-oss": Model(job=hf_job("GptOssConfig", CLM, **GROUPED, num_local_experts=4, num_experts_per_tok=2)),
    "bert": Model(job=hf_job("BertConfig", MLM, a.masked_text, **TEXT)),
    "roberta": Model(job=hf_job("RobertaConfig", MLM, **TEXT), alike="bert"),
    "deberta-v2": Model(
        job=hf_job(
            "DebertaV2Config", MLM, **TEXT, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]
        )
    ),
    "electra": Model(job=hf_job("ElectraConfig", MLM, **TEXT, embedding_size=16), alike="bert"),
    "distilbert": Model(
        job=hf_job(
            "DistilBertConfig",
            "AutoModelForSequenceClassification",
            a.labelled_text,
            vocab_size=a.VOCABULARY,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=64,
            max_position_embeddings=32,
            num_labels=a.NUM_CLASSES,
        ),
        alike="bert",
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
    "marian": Model(job=hf_job("MarianConfig", S2S, **SEQ2SEQ), alike="bart"),
    "xglm": Model(
        job=hf_job(
            "XGLMConfig",
            CLM,
            vocab_size=a.VOCABULARY,
            d_model=32,
            ffn_dim=64,
            num_layers=2,
            attention_heads=4,
            max_position_embeddings=32,
        ),
        alike="gpt2",
    ),
    "deepseek-v3": Model(job=hf_job("DeepseekV3Config", CLM, **LATENT)),
    "falcon-grouped": Model(
        job=hf_job("FalconConfig", CLM, **TEXT, new_decoder_architecture=True, num_kv_heads=2), alike="llama"
    ),
    "gptj": Model(
        job=hf_job(
            "GPTJConfig",
            CLM,
            vocab_size=a.VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=32,
            n_inner=64,
            rotary_dim=4,
        ),
        alike="phi",
    ),
    "mpt": Model(
        job=hf_job("MptConfig", CLM, vocab_size=a.VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
        alike="phi",
    ),
    "olmo2": Model(job=hf_job("Olmo2Config", CLM, **{**TEXT, "num_key_value_heads": 2})),
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
    "deit": Model(job=hf_job("DeiTConfig", "DeiTForImageClassification", a.images, **IMAGE), alike="vit"),
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
    "resnet-bottleneck": Model(
        job=hf_job("ResNetConfig", IMAGES, a.images, **{**RESNET, "hidden_sizes": [32, 64]}),
        traits=NORMS,
        alike="resnet",
    ),
    "regnet": Model(
        job=hf_job("RegNetConfig", IMAGES, a.images, **RESNET, groups_width=4), traits=NORMS, alike="resnet"
    ),
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
    "wav2vec2-conformer": Model(
        job=hf_job(
            "Wav2Vec2ConformerConfig",
            "AutoModelForAudioClassification",
            a.waveforms,
            **AUDIO,
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            conv_depthwise_kernel_size=3,
            layerdrop=0.0,
            mask_time_prob=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            conformer_conv_dropout=0.0,
            feat_proj_dropout=0.0,
        ),
        skips=IN_HALVES,
        traits=NORMS,
        alike="wav2vec2",
    ),
    "llama-masked": Model(job=hf_job("LlamaConfig", CLM, a.masked_text, **GROUPED), alike="llama"),
    "llama-recomputed": Model(
        job=small_job(partial(recomputed, "LlamaConfig", CLM, use_reentrant=False, **GROUPED), a.text)
    ),
    "llama-recomputed-reentrant": Model(
        job=small_job(partial(recomputed, "LlamaConfig", CLM, use_reentrant=True, **GROUPED), a.text),
        alike="llama-recomputed",
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
    "rwkv": Model(
        job=hf_job("RwkvConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=16, num_hidden_layers=3, context_length=32),
        skips=LOOPS,
    ),
    "albert": Model(job=hf_job("AlbertConfig", MLM, **TEXT, embedding_size=8)),
    "pegasus": Model(job=hf_job("PegasusConfig", "AutoModelForSeq2SeqLM", **SEQ2SEQ), alike="bart"),
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
