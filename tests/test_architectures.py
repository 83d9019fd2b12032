"""Any architecture through pipeline stages: the same losses, gradient norms and weights as in one process."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import pytest
from torch import nn

from tests import architectures as a
from tests.hugging_face import (
    CLM,
    IMAGES,
    MLM,
    hf_job,
    hugging_face,
    image_settings,
    recomputed,
    seq2seq_settings,
    small_job,
    t5_settings,
    text_settings,
)
from tests.parity import Job, Layout, LayoutRun, ReferenceRun, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

PP2 = Layout(pp=2, num_microbatches=2)
PP4 = Layout(pp=4, num_microbatches=4)
WHOLE = Layout(pp=2, num_microbatches=1, schedule="gpipe")
"""For losses that are not a mean over samples (BatchNorm, contrastive and load-balancing losses)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An architecture and the layouts that it is trained in."""

    job: Job
    layouts: tuple[Layout, ...] = (PP2,)
    further: tuple[Layout, ...] = ()
    """Those that are left to `make test-matrix`."""


_TEXT = text_settings(width=16, num_heads=2, num_layers=3)
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_SEQ2SEQ = seq2seq_settings(width=16, num_heads=2)
_IMAGE = image_settings(width=16, num_heads=2, num_layers=3)
_TOWERS = {
    "text_config": {**_TEXT, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
    "vision_config": {**_IMAGE, "projection_dim": 8},
    "projection_dim": 8,
}

HUGGING_FACE = {
    "llama": Row(job=hf_job("LlamaConfig", CLM, **_GROUPED), further=(Layout(pp=2, dp=2, num_microbatches=2),)),
    "llama-tied": Row(job=hf_job("LlamaConfig", CLM, **_GROUPED, tie_word_embeddings=True), further=(PP4,)),
    "llama-masked": Row(job=hf_job("LlamaConfig", CLM, a.masked_text, **_GROUPED)),
    "llama-recomputed": Row(
        job=small_job(partial(recomputed, "LlamaConfig", CLM, use_reentrant=False, **_GROUPED), a.text),
        layouts=(Layout(pp=2, tp=2, num_microbatches=2),),
        further=(Layout(pp=2, dp=2, zero=3, num_microbatches=2),),
    ),
    "llama-recomputed-reentrant": Row(
        job=small_job(partial(recomputed, "LlamaConfig", CLM, use_reentrant=True, **_GROUPED), a.text),
    ),
    "gpt2": Row(
        job=hf_job(
            "GPT2Config", CLM, vocab_size=a.VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32, n_inner=32
        )
    ),
    "mistral": Row(job=hf_job("MistralConfig", CLM, **_GROUPED, sliding_window=4)),
    "qwen3": Row(job=hf_job("Qwen3Config", CLM, **_GROUPED), layouts=(Layout(pp=2, tp=2, num_microbatches=2),)),
    "mixtral": Row(job=hf_job("MixtralConfig", CLM, **_GROUPED, num_local_experts=4)),
    "mixtral-balanced": Row(
        job=hf_job("MixtralConfig", CLM, **_GROUPED, num_local_experts=4, output_router_logits=True),
        layouts=(WHOLE,),
    ),
    "gemma": Row(job=hf_job("GemmaConfig", CLM, **_GROUPED)),
    "gemma3n": Row(  # later layers read keys and values from a dict that earlier ones fill
        job=hf_job(
            "Gemma3nTextConfig",
            CLM,
            **{**_GROUPED, "num_hidden_layers": 4},
            vocab_size_per_layer_input=a.VOCABULARY,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            layer_types=["sliding_attention", "full_attention"] * 2,
            sliding_window=8,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
            altup_num_inputs=2,
        ),
        layouts=(Layout(pp=2, tp=2, num_microbatches=2),),
    ),
    "phi": Row(job=hf_job("PhiConfig", CLM, **_TEXT)),
    "opt": Row(
        job=hf_job(
            "OPTConfig",
            CLM,
            **{**_TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
        )
    ),
    "bloom": Row(job=hf_job("BloomConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=16, n_layer=3, n_head=2)),
    "falcon": Row(job=hf_job("FalconConfig", CLM, **_TEXT)),
    "gpt-neox": Row(job=hf_job("GPTNeoXConfig", CLM, **_TEXT)),
    "mamba": Row(
        job=hf_job("MambaConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=16, num_hidden_layers=3, state_size=4)
    ),
    "rwkv": Row(
        job=hf_job("RwkvConfig", CLM, vocab_size=a.VOCABULARY, hidden_size=16, num_hidden_layers=3, context_length=32)
    ),
    "bert": Row(job=hf_job("BertConfig", MLM, a.masked_text, **_TEXT)),
    "albert": Row(job=hf_job("AlbertConfig", MLM, **_TEXT, embedding_size=8)),
    "roberta": Row(job=hf_job("RobertaConfig", MLM, **_TEXT)),
    "deberta-v2": Row(
        job=hf_job(
            "DebertaV2Config",
            MLM,
            **_TEXT,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        )
    ),
    "electra": Row(job=hf_job("ElectraConfig", MLM, **_TEXT, embedding_size=8)),
    "distilbert": Row(
        job=hf_job(
            "DistilBertConfig",
            "AutoModelForSequenceClassification",
            a.labelled_text,
            vocab_size=a.VOCABULARY,
            dim=16,
            n_layers=3,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=32,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "t5": Row(
        job=hf_job("T5Config", "AutoModelForSeq2SeqLM", **t5_settings()),
        further=(PP4,),
    ),
    "bart": Row(job=hf_job("BartConfig", "AutoModelForSeq2SeqLM", **_SEQ2SEQ, forced_eos_token_id=2)),
    "pegasus": Row(job=hf_job("PegasusConfig", "AutoModelForSeq2SeqLM", **_SEQ2SEQ)),
    "marian": Row(job=hf_job("MarianConfig", "AutoModelForSeq2SeqLM", **_SEQ2SEQ)),
    "whisper": Row(
        job=hf_job(
            "WhisperConfig",
            "AutoModelForSpeechSeq2Seq",
            a.spectrograms,
            **{**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        )
    ),
    "wav2vec2": Row(
        job=hf_job(
            "Wav2Vec2Config",
            "AutoModelForAudioClassification",
            a.waveforms,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            classifier_proj_size=8,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "vit": Row(job=hf_job("ViTConfig", IMAGES, a.images, **_IMAGE)),
    "deit": Row(job=hf_job("DeiTConfig", "DeiTForImageClassification", a.images, **_IMAGE)),
    "swin": Row(
        job=hf_job(
            "SwinConfig",
            IMAGES,
            a.images,
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 2],
            num_heads=[2, 2],
            window_size=4,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "resnet": Row(
        job=hf_job(
            "ResNetConfig",
            IMAGES,
            a.images,
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[2, 2],
            layer_type="basic",
            num_labels=a.NUM_CLASSES,
        ),
        layouts=(WHOLE,),
    ),
    "convnext": Row(
        job=hf_job(
            "ConvNextConfig",
            IMAGES,
            a.images,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            num_stages=2,
            patch_size=2,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "segformer": Row(
        job=hf_job(
            "SegformerConfig",
            "AutoModelForSemanticSegmentation",
            a.segmented_images,
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[7, 3],
            strides=[4, 2],
            num_attention_heads=[1, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=8,
            num_labels=2,
        ),
        layouts=(WHOLE,),
    ),
    "clip": Row(
        job=hf_job("CLIPConfig", "AutoModel", a.images_with_text, arguments={"return_loss": True}, **_TOWERS),
        layouts=(WHOLE,),
    ),
    "batch-encoding": Row(
        job=small_job(partial(hugging_face, "BertConfig", MLM, **_TEXT), a.text, collate=a.collate_encoding)
    ),
}

OWN = {
    "unet": Row(job=small_job(a.UNet, a.images), further=(PP4,)),
    "nn-transformer": Row(job=small_job(a.EncoderDecoder, a.sequences), layouts=(PP4,)),
    "residual-vit": Row(
        job=small_job(a.ResidualViT, a.images), further=(PP4, Layout(pp=2, dp=2, zero=3, num_microbatches=2))
    ),
    "lstm": Row(job=small_job(partial(a.Recurrent, nn.LSTM), a.token_pairs), further=(PP4,)),
    "gru": Row(job=small_job(partial(a.Recurrent, nn.GRU), a.token_pairs)),
    "unrolled-cell": Row(job=small_job(a.UnrolledCell, a.sequences), further=(PP4,)),
    "structures": Row(job=small_job(a.Structures, a.sequences), further=(PP4,)),
    "mixture": Row(
        job=small_job(a.Mixture, a.sequences),
        layouts=(
            PP2,
            Layout(pp=2, dp=2, zero=3, num_microbatches=2),
            Layout(pp=2, tp=2, num_microbatches=2),
            Layout(pp=2, num_microbatches=4, schedule="interleaved"),
        ),
        further=(PP4,),
    ),
    "collected": Row(
        job=small_job(a.Collected, a.sequences),
        further=(PP4, Layout(pp=2, dp=2, zero=3, num_microbatches=2)),
    ),
    "lora": Row(job=small_job(a.Adapted, a.vectors), further=(PP4,)),
    "parameterless": Row(job=small_job(a.Parameterless, a.images)),
    "ties": Row(job=small_job(a.Ties, a.token_pairs), further=(PP4,)),
    "functions": Row(
        job=small_job(partial(a.CustomFunctions, use_reentrant=False), a.sequences),
        further=(Layout(pp=2, dp=2, zero=3, num_microbatches=2),),
    ),
    "functions-reentrant": Row(job=small_job(partial(a.CustomFunctions, use_reentrant=True), a.sequences)),
    "nested-batches": Row(job=small_job(a.NestedBatches, a.named_text, collate=a.collate_examples, num_missing=1)),
    "last-batch-of-one": Row(job=small_job(a.EncoderDecoder, a.sequences, num_missing=3)),
}

TABLE = {**HUGGING_FACE, **OWN}
ALIKE = (
    *("mistral", "gemma", "qwen3", "phi", "opt", "bloom", "falcon", "gpt-neox"),  # llama, gpt2
    *("roberta", "electra", "distilbert"),  # bert, albert
    *("pegasus", "marian"),  # bart
    *("deit", "convnext"),  # vit, resnet
    "gru",  # lstm
)
"""Architectures that pipelines cut as they do others, and that are left to `make test-matrix`."""

CASES = [(name, layout) for name, row in TABLE.items() for layout in (*row.layouts, *row.further)]


def _is_in_matrix(name: str, layout: Layout) -> bool:
    return name in ALIKE or layout in TABLE[name].further


@pytest.mark.parametrize(
    ("name", "layout"), some_in_matrix(CASES, _is_in_matrix), ids=[f"{name}-{layout}" for name, layout in CASES]
)
def test_architecture_equals_one_process(
    workers: WorkerPools, references: dict[str, ReferenceRun], name: str, layout: Layout
) -> None:
    job = TABLE[name].job
    if name not in references:
        references[name] = run_reference(job)
    result = run_layout(workers, job, layout)
    assert_parity(references[name], result, tolerance=1e-5)
    assert_cut(references[name], result, layout)


def assert_cut(reference: ReferenceRun, result: LayoutRun, layout: Layout) -> None:
    """Every stage holds a part, and not all hold the whole (in tiny models one may, by ties and repeated calls)."""
    stages = [result.held[stage * layout.dp * layout.tp].parameters.keys() for stage in range(layout.pp)]
    assert all(stages), f"a stage holds nothing: {stages}"
    assert any(held < reference.parameters.keys() for held in stages), "every stage holds the whole model"
