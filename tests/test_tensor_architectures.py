"""Any architecture with tensor parallel: the numbers of one process, Megatron's collectives, and really sharded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import pytest
import transformers

from lightning_3d.tensor import WeightPlan
from tests import architectures as a
from tests.collectives import by_kind, planned
from tests.hugging_face import (
    CLM,
    IMAGES,
    MLM,
    S2S,
    hf_job,
    image_settings,
    seq2seq_settings,
    small_job,
    text_settings,
)
from tests.parity import Job, Layout, LayoutRun, ReferenceRun, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerPools


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Of every block of one class."""

    forward: int = 2
    """All-reduces in the forward."""
    backward: int | Mapping[int, int] = 2
    """All-reduces in the backward, of any size or by size: what ranks share gets the sum of its gradients, too."""
    others: int = 0
    """Other collectives in the forward."""
    share: float = 0.94
    """Least share of parameters that is sharded; the rest are norms and biases of row weights."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An architecture, and what planning finds for its classes of blocks."""

    job: Job
    blocks: Mapping[str, Expected]
    """By class of the block, or by a part of its FQN."""
    held: float = 0.65
    """Greatest share of the single process's parameters that a rank of two holds."""
    sizes: tuple[int, ...] = (2,)
    tolerance: float = 1e-5
    """Greatest difference from the single process."""
    is_routed: bool = False
    """Whether how often experts are run depends on data; planning takes it that all are."""


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
RESNET = {
    "embedding_size": 8,
    "hidden_sizes": [16, 32],
    "depths": [2, 2],
    "num_labels": a.NUM_CLASSES,
}
OPTIMUM = Expected()
CROSS = Expected(forward=3, backward=4)
"""Self-attention, cross-attention (its keys and values read another input) and MLP."""
PARALLEL = Expected(forward=2, backward=1)
"""Attention and MLP read the same norm."""
SCORED = Expected(backward=3)
"""What experts give is summed once it is added up; so the scores' gradient is summed, too."""
SHARED_EXPERT = Expected(forward=3, backward=3)
"""Attention, the experts that a token is routed to, and the one that all tokens go to."""
NARROW_EXPERTS = Expected(forward=3, backward=5, share=0.9)
"""What experts give is reduced once it is added up; so the scores' gradient is reduced, too. And a shared expert."""
EXPERT_BY_EXPERT = Expected(forward=6, backward=6)
"""Attention, four experts and the one that marks padding: as if tokens were routed to all of them."""
POOLED = Expected(forward=0, backward=0, others=2, share=1.0)
"""A stem that gathers what its pooling leaves, and running statistics; images need no gradient."""
EXPANDED = Expected(others=1, share=0.98)
"""An inverted residual with squeeze and excitation."""

TABLE = {
    "llama": Row(job=hf_job("LlamaConfig", CLM, **GROUPED), blocks={"LlamaDecoderLayer": OPTIMUM}),
    "llama-tied": Row(
        job=hf_job("LlamaConfig", CLM, **{**GROUPED, "num_key_value_heads": 4}, tie_word_embeddings=True),
        blocks={"LlamaDecoderLayer": OPTIMUM},
        sizes=(2, 4),
    ),
    "llama-one-kv-head": Row(
        job=hf_job("LlamaConfig", CLM, **ONE_KEY),
        blocks={"LlamaDecoderLayer": Expected(backward=4, share=0.84)},
        sizes=(2, 4),
    ),
    "mistral": Row(
        job=hf_job("MistralConfig", CLM, **GROUPED, sliding_window=4), blocks={"MistralDecoderLayer": OPTIMUM}
    ),
    "qwen2": Row(
        job=hf_job("Qwen2Config", CLM, **{**TEXT, "num_key_value_heads": 2}),
        blocks={"Qwen2DecoderLayer": OPTIMUM},
    ),
    "qwen3": Row(job=hf_job("Qwen3Config", CLM, **GROUPED), blocks={"Qwen3DecoderLayer": Expected(backward=4)}),
    "gemma": Row(job=hf_job("GemmaConfig", CLM, **GROUPED), blocks={"GemmaDecoderLayer": OPTIMUM}),
    "phi": Row(job=hf_job("PhiConfig", CLM, **TEXT), blocks={"PhiDecoderLayer": PARALLEL}),
    "phi3": Row(job=hf_job("Phi3Config", CLM, **TEXT), blocks={"Phi3DecoderLayer": OPTIMUM}),
    "opt": Row(
        job=hf_job("OPTConfig", CLM, **{**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
        blocks={"OPTDecoderLayer": OPTIMUM},
    ),
    "bloom": Row(
        job=hf_job("BloomConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
        blocks={"BloomBlock": OPTIMUM},
        sizes=(2, 4),
    ),
    "gpt2": Row(
        job=hf_job(
            "GPT2Config", CLM, vocab_size=a.VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=64
        ),
        blocks={"GPT2Block": OPTIMUM},
        sizes=(2, 4),
    ),
    "gpt-neox": Row(job=hf_job("GPTNeoXConfig", CLM, **TEXT), blocks={"GPTNeoXLayer": OPTIMUM}, sizes=(2, 4)),
    "falcon": Row(job=hf_job("FalconConfig", CLM, **TEXT, multi_query=False), blocks={"FalconDecoderLayer": PARALLEL}),
    "mixtral": Row(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="batched_mm"),
        blocks={"MixtralDecoderLayer": Expected(backward={2: 3, 4: 5})},
        sizes=(2, 4),
    ),
    "mixtral-grouped": Row(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="grouped_mm"),
        blocks={"MixtralDecoderLayer": SCORED},
    ),
    "mixtral-eager": Row(
        job=hf_job("MixtralConfig", CLM, **GROUPED, num_local_experts=4, experts_implementation="eager"),
        blocks={"MixtralDecoderLayer": EXPERT_BY_EXPERT},
        is_routed=True,
    ),
    "qwen3-moe": Row(
        job=hf_job("Qwen3MoeConfig", CLM, **GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64),
        blocks={"Qwen3MoeDecoderLayer": Expected(backward=5)},
    ),
    "olmoe": Row(
        job=hf_job("OlmoeConfig", CLM, **TEXT, num_experts=4, num_experts_per_tok=2),
        blocks={"OlmoeDecoderLayer": Expected(forward=4, backward=5)},
    ),
    "qwen2-moe": Row(
        job=hf_job(
            "Qwen2MoeConfig",
            CLM,
            **GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        blocks={"Qwen2MoeDecoderLayer": Expected(forward=3, backward=4)},
    ),
    "llama4": Row(
        job=hf_job(
            "Llama4TextConfig",
            CLM,
            **GROUPED,
            num_local_experts=4,
            intermediate_size_mlp=64,
            interleave_moe_layer_step=1,
        ),
        blocks={"Llama4TextDecoderLayer": SHARED_EXPERT},
    ),
    "gpt-oss": Row(
        job=hf_job("GptOssConfig", CLM, **GROUPED, num_local_experts=4, num_experts_per_tok=2),
        blocks={"GptOssDecoderLayer": OPTIMUM},
    ),
    "bert": Row(job=hf_job("BertConfig", MLM, a.masked_text, **TEXT), blocks={"BertLayer": OPTIMUM}, sizes=(2, 4)),
    "roberta": Row(job=hf_job("RobertaConfig", MLM, **TEXT), blocks={"RobertaLayer": OPTIMUM}),
    "deberta-v2": Row(
        job=hf_job(
            "DebertaV2Config",
            MLM,
            **TEXT,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["p2c", "c2p"],
        ),
        blocks={"DebertaV2Layer": Expected(backward=3)},
    ),
    "electra": Row(job=hf_job("ElectraConfig", MLM, **TEXT, embedding_size=16), blocks={"ElectraLayer": OPTIMUM}),
    "distilbert": Row(
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
        blocks={"TransformerBlock": OPTIMUM},
    ),
    "t5": Row(
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
        ),
        blocks={"encoder.block.": OPTIMUM, "decoder.block.": CROSS},
    ),
    "bart": Row(
        job=hf_job("BartConfig", S2S, **SEQ2SEQ, forced_eos_token_id=2),
        blocks={"BartEncoderLayer": OPTIMUM, "BartDecoderLayer": CROSS},
    ),
    "marian": Row(
        job=hf_job("MarianConfig", S2S, **SEQ2SEQ),
        blocks={"MarianEncoderLayer": OPTIMUM, "MarianDecoderLayer": CROSS},
    ),
    "xglm": Row(
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
        blocks={"XGLMDecoderLayer": OPTIMUM},
    ),
    "deepseek-v3": Row(
        job=hf_job("DeepseekV3Config", CLM, **LATENT),
        blocks={"layers.0": Expected(backward=3, share=0.9), "layers.1": NARROW_EXPERTS},
    ),
    "falcon-grouped": Row(
        job=hf_job("FalconConfig", CLM, **TEXT, new_decoder_architecture=True, num_kv_heads=2),
        blocks={"FalconDecoderLayer": OPTIMUM},
    ),
    "gptj": Row(
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
        blocks={"GPTJBlock": PARALLEL},
    ),
    "mpt": Row(
        job=hf_job("MptConfig", CLM, vocab_size=a.VOCABULARY, d_model=32, n_layers=2, n_heads=4, max_seq_len=32),
        blocks={"MptBlock": OPTIMUM},
        sizes=(2, 4),
    ),
    "olmo2": Row(
        job=hf_job("Olmo2Config", CLM, **{**TEXT, "num_key_value_heads": 2}),
        blocks={"Olmo2DecoderLayer": Expected(forward=4, backward=4)},
    ),
    "swin": Row(
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
        ),
        blocks={"SwinStage": Expected(forward=4, backward=4, share=0.7)},
    ),
    "vit": Row(job=hf_job("ViTConfig", IMAGES, a.images, **IMAGE), blocks={"ViTLayer": OPTIMUM}, sizes=(2, 4)),
    "deit": Row(
        job=hf_job("DeiTConfig", "DeiTForImageClassification", a.images, **IMAGE),
        blocks={"DeiTLayer": OPTIMUM},
    ),
    "clip": Row(
        job=hf_job(
            "CLIPConfig",
            "AutoModel",
            a.images_with_text,
            arguments={"return_loss": True},
            text_config={**TEXT, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
            vision_config={**IMAGE, "projection_dim": 8},
            projection_dim=8,
        ),
        blocks={"CLIPEncoderLayer": OPTIMUM},
    ),
    "resnet": Row(
        job=hf_job("ResNetConfig", IMAGES, a.images, **{**RESNET, "layer_type": "basic"}),
        blocks={"ResNetEmbeddings": POOLED, "ResNetStage": Expected(others=1, share=0.97)},
        held=0.52,
        sizes=(2, 4),
    ),
    "resnet-bottleneck": Row(
        job=hf_job("ResNetConfig", IMAGES, a.images, **{**RESNET, "hidden_sizes": [32, 64]}),
        blocks={
            "ResNetEmbeddings": POOLED,
            "ResNetStage": Expected(others=2, share=0.62),
        },  # fewer bytes for fewer shards
        held=0.67,
    ),
    "regnet": Row(
        job=hf_job("RegNetConfig", IMAGES, a.images, **RESNET, groups_width=4),
        blocks={"RegNetStage": Expected(forward=4, backward=4, others=1, share=0.9)},
        held=0.57,
    ),
    "convnext": Row(
        job=hf_job(
            "ConvNextConfig",
            IMAGES,
            a.images,
            hidden_sizes=[16, 32],
            depths=[2, 2],
            num_stages=2,
            patch_size=2,
            num_labels=a.NUM_CLASSES,
        ),
        blocks={"ConvNextStage": Expected(share=0.7)},
    ),
    "efficientnet": Row(
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
        blocks={f"encoder.blocks.{index}": EXPANDED for index in range(1, 8)},
        held=0.6,
    ),
    "segformer": Row(
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
            num_labels=2,
            hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            drop_path_rate=0.0,
        ),
        blocks={
            "stages.0": Expected(forward=4, backward=6, share=0.6),  # keys and values read fewer pixels
            "stages.1": Expected(forward=4, backward=4, share=0.84),
        },
    ),
    "diffusion-unet": Row(
        job=small_job(a.DiffusionUNet, a.images),
        blocks={
            "Residual": Expected(forward=1, backward=1, share=0.9),  # the time needs no gradient
            "Attention": Expected(forward=1, backward=1),
        },
        held=0.56,
        sizes=(2, 4),
    ),
    "depthwise-pyramid": Row(
        job=small_job(a.DepthwisePyramid, partial(a.images, size=64)),
        blocks={"InvertedResidual": Expected(forward=1, backward=1, others=1, share=0.97)},
        tolerance=1e-11,
    ),
    "wav2vec2-conformer": Row(
        job=hf_job(
            "Wav2Vec2ConformerConfig",
            "AutoModelForAudioClassification",
            a.waveforms,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            conv_depthwise_kernel_size=3,
            classifier_proj_size=8,
            num_labels=a.NUM_CLASSES,
            layerdrop=0.0,
            mask_time_prob=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            conformer_conv_dropout=0.0,
            feat_proj_dropout=0.0,
        ),
        blocks={"Wav2Vec2ConformerEncoderLayer": Expected(forward=4, backward=4, others=1, share=0.97)},
        held=0.56,
    ),
    "nn-transformer": Row(
        job=small_job(a.EncoderDecoder, a.sequences),
        blocks={
            "encoder.layers.0": Expected(backward=1),  # the batch needs no gradient
            "encoder.layers.1": OPTIMUM,
            "decoder.layers.0": Expected(forward=3, backward=3),
            "decoder.layers.1": CROSS,
        },
    ),
}
CASES = [(name, size) for name, row in TABLE.items() for size in row.sizes]

ALIKE = (
    *("mistral", "gemma", "qwen2", "xglm"),  # llama, gpt2
    *("roberta", "electra", "distilbert"),  # bert
    "marian",  # bart
    *("deit", "regnet", "resnet-bottleneck"),  # vit, resnet
    *("mixtral-eager", "qwen2-moe"),  # mixtral, qwen3-moe
)
"""Architectures whose blocks are sharded as others, and that are left to `make test-matrix`."""

ON_FOUR_RANKS = ("llama-tied", "llama-one-kv-head")
"""Those that `make test` runs on four ranks."""


def _is_in_matrix(name: str, size: int) -> bool:
    return name in ALIKE or (size == 4 and name not in ON_FOUR_RANKS)


@pytest.mark.parametrize(
    ("name", "size"), some_in_matrix(CASES, _is_in_matrix), ids=[f"{name}-{size}" for name, size in CASES]
)
def test_architecture_equals_one_process(
    workers: WorkerPools, references: dict[str, ReferenceRun], name: str, size: int
) -> None:
    row = TABLE[name]
    if name not in references:
        references[name] = run_reference(row.job)
    result = run_layout(workers, row.job, Layout(tp=size), measures_sent=True)
    assert_parity(references[name], result, row.tolerance)
    assert_planned(row, result)
    assert_sent(row, result)
    assert_as_by_hand(row.job, result, size)
    assert_held(references[name], result, row.held if size == 2 else row.held - 0.15)


def assert_planned(row: Row, result: LayoutRun) -> None:
    """The collectives of every block, and the share of its parameters that is sharded."""
    expectations = [(name, block) for name in row.blocks for block in result.plan.blocks]
    matching = [(name, block) for name, block in expectations if name == block.kind or name in block.fqn]
    assert {name for name, _ in matching} == row.blocks.keys()
    for name, block in matching:
        expected, plan = row.blocks[name], block.tensor
        assert plan is not None
        assert plan.is_sharded, f"{block.fqn}: {plan}"
        backward = expected.backward if isinstance(expected.backward, int) else expected.backward[plan.size]
        counts = (plan.num_all_reduces_forward, plan.num_all_reduces_backward, plan.num_other_collectives_forward)
        assert counts == (expected.forward, backward, expected.others), f"{block.fqn}: {plan}"
        assert plan.sharded_share >= expected.share, f"{block.fqn}: {plan}"


def assert_sent(row: Row, result: LayoutRun) -> None:
    """Every block communicates what is planned: in number, kind and bytes, forward and backward, on every rank."""
    sharded = {block.fqn: block.tensor for block in result.plan.blocks if block.tensor and block.tensor.is_sharded}
    for sent in result.sent:
        assert sent.keys() <= sharded.keys()
        assert {fqn for fqn, plan in sharded.items() if plan.collectives} <= sent.keys()
        for fqn, measured in sent.items():
            expected = tuple(planned(sharded[fqn], is_backward=is_backward) for is_backward in (False, True))
            if row.is_routed:
                assert all(by_kind(made) <= by_kind(wanted) for made, wanted in zip(measured, expected, strict=True))
            else:
                assert measured == expected, f"{fqn}: {measured}, planned {expected}: {sharded[fqn]}"


def assert_as_by_hand(job: Job, result: LayoutRun, size: int) -> None:
    """Where transformers carries a plan made by hand (``base_model_tp_plan``), what is found shards no weight less.

    Its plans need a key-value head per rank.
    """
    if not isinstance(job.model, partial) or job.model.keywords.get("num_key_value_heads", size) < size:
        return
    by_hand = getattr(getattr(transformers, job.model.args[0]), "base_model_tp_plan", None) or {}
    weights = {
        f"{block.fqn}.{weight.fqn}": _role_by_hand(weight)
        for block in result.plan.blocks
        if block.tensor is not None
        for weight in block.tensor.weights
    }
    sharded = [pattern for pattern, style in by_hand.items() if "colwise" in style or "rowwise" in style]
    for pattern in sharded:
        named = [fqn for fqn in weights if fnmatchcase(fqn, f"*.{pattern}") or fnmatchcase(fqn, f"*.{pattern}.weight")]
        assert all(weights[fqn] in ("column", "row") for fqn in named), f"{pattern} is sharded by hand: {weights}"


def _role_by_hand(weight: WeightPlan) -> str:
    """As transformers names it: of stacked weights by their dims, whatever they are multiplied with."""
    roles = {None: weight.role, 1: "column", 2: "row"}
    return roles.get(weight.shard_dim, weight.role) if len(weight.shape) == 3 else weight.role


def assert_held(reference: ReferenceRun, result: LayoutRun, most: float) -> None:
    """No rank holds more parameters than that share of the single process's, and AdamW's state is twice as many."""
    total = sum(reference.parameters.values())
    for held in result.held:
        num_parameters = sum(held.parameters.values())
        assert num_parameters <= most * total, f"{num_parameters} of {total} are {num_parameters / total:.3f}"
        trained = sum(number for fqn, number in held.parameters.items() if fqn in held.optimizer_state)
        assert sum(held.optimizer_state.values()) == 2 * trained
