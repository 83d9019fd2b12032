"""Any architecture through pipeline stages: the same losses, gradient norms and weights as in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from torch import nn

from tests import architectures as a
from tests.parity import Job, Layout, LayoutRun, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

PP2 = Layout(pp=2, num_microbatches=2)
PP4 = Layout(pp=4, num_microbatches=4)
WHOLE = Layout(pp=2, num_microbatches=1, schedule="gpipe")
"""For losses that are not a mean over samples (BatchNorm, contrastive and load-balancing losses)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """An architecture and the layouts that it is trained in."""

    job: Job
    layouts: tuple[Layout, ...] = field(default=(PP2,))


def _job(model: Any, data: Any, **settings: Any) -> Job:
    return Job(model=model, data=data, global_batch_size=4, num_val_batches=1, **settings)


def _hf(config: str, model_class: str, data: Any = a.text, **settings: Any) -> Job:
    return _job(partial(a.hugging_face, config, model_class, **settings), data)


_TEXT: dict[str, Any] = {
    "vocab_size": a.VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_SEQ2SEQ = {
    "vocab_size": a.VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
_IMAGE = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": a.NUM_CLASSES,
}
_TOWERS = {
    "text_config": {**_TEXT, "projection_dim": 8, "eos_token_id": 2, "bos_token_id": 1},
    "vision_config": {**_IMAGE, "projection_dim": 8},
    "projection_dim": 8,
}
_CLM, _MLM, _IMAGES = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForImageClassification"

HUGGING_FACE = {
    "llama": Row(job=_hf("LlamaConfig", _CLM, **_GROUPED), layouts=(PP2, Layout(pp=2, dp=2, num_microbatches=2))),
    "llama-tied": Row(job=_hf("LlamaConfig", _CLM, **_GROUPED, tie_word_embeddings=True), layouts=(PP4,)),
    "llama-masked": Row(job=_hf("LlamaConfig", _CLM, a.masked_text, **_GROUPED)),
    "gpt2": Row(
        job=_hf("GPT2Config", _CLM, vocab_size=a.VOCABULARY, n_embd=16, n_layer=3, n_head=2, n_positions=32, n_inner=32)
    ),
    "mistral": Row(job=_hf("MistralConfig", _CLM, **_GROUPED, sliding_window=4)),
    "qwen3": Row(job=_hf("Qwen3Config", _CLM, **_GROUPED), layouts=(Layout(pp=2, tp=2, num_microbatches=2),)),
    "mixtral": Row(job=_hf("MixtralConfig", _CLM, **_GROUPED, num_local_experts=4)),
    "mixtral-balanced": Row(
        job=_hf("MixtralConfig", _CLM, **_GROUPED, num_local_experts=4, output_router_logits=True), layouts=(WHOLE,)
    ),
    "gemma": Row(job=_hf("GemmaConfig", _CLM, **_GROUPED)),
    "phi": Row(job=_hf("PhiConfig", _CLM, **_TEXT)),
    "opt": Row(
        job=_hf(
            "OPTConfig",
            _CLM,
            **{**_TEXT, "ffn_dim": 32, "word_embed_proj_dim": 16},
        )
    ),
    "bloom": Row(job=_hf("BloomConfig", _CLM, vocab_size=a.VOCABULARY, hidden_size=16, n_layer=3, n_head=2)),
    "falcon": Row(job=_hf("FalconConfig", _CLM, **_TEXT)),
    "gpt-neox": Row(job=_hf("GPTNeoXConfig", _CLM, **_TEXT)),
    "mamba": Row(
        job=_hf("MambaConfig", _CLM, vocab_size=a.VOCABULARY, hidden_size=16, num_hidden_layers=3, state_size=4)
    ),
    "rwkv": Row(
        job=_hf("RwkvConfig", _CLM, vocab_size=a.VOCABULARY, hidden_size=16, num_hidden_layers=3, context_length=32)
    ),
    "bert": Row(job=_hf("BertConfig", _MLM, a.masked_text, **_TEXT)),
    "albert": Row(job=_hf("AlbertConfig", _MLM, **_TEXT, embedding_size=8)),
    "roberta": Row(job=_hf("RobertaConfig", _MLM, **_TEXT)),
    "deberta-v2": Row(
        job=_hf(
            "DebertaV2Config",
            _MLM,
            **_TEXT,
            relative_attention=True,
            position_buckets=4,
            pos_att_type=["p2c", "c2p"],
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        )
    ),
    "electra": Row(job=_hf("ElectraConfig", _MLM, **_TEXT, embedding_size=8)),
    "distilbert": Row(
        job=_hf(
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
        job=_hf(
            "T5Config",
            "AutoModelForSeq2SeqLM",
            vocab_size=a.VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        layouts=(PP2, PP4),
    ),
    "bart": Row(job=_hf("BartConfig", "AutoModelForSeq2SeqLM", **_SEQ2SEQ, forced_eos_token_id=2)),
    "pegasus": Row(job=_hf("PegasusConfig", "AutoModelForSeq2SeqLM", **_SEQ2SEQ)),
    "marian": Row(job=_hf("MarianConfig", "AutoModelForSeq2SeqLM", **_SEQ2SEQ)),
    "whisper": Row(
        job=_hf(
            "WhisperConfig",
            "AutoModelForSpeechSeq2Seq",
            a.spectrograms,
            **{**_SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        )
    ),
    "wav2vec2": Row(
        job=_hf(
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
    "vit": Row(job=_hf("ViTConfig", _IMAGES, a.images, **_IMAGE)),
    "deit": Row(job=_hf("DeiTConfig", "DeiTForImageClassification", a.images, **_IMAGE)),
    "swin": Row(
        job=_hf(
            "SwinConfig",
            _IMAGES,
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
        job=_hf(
            "ResNetConfig",
            _IMAGES,
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
        job=_hf(
            "ConvNextConfig",
            _IMAGES,
            a.images,
            hidden_sizes=[8, 16],
            depths=[1, 2],
            num_stages=2,
            patch_size=2,
            num_labels=a.NUM_CLASSES,
        )
    ),
    "segformer": Row(
        job=_hf(
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
        job=_hf("CLIPConfig", "AutoModel", a.images_with_text, arguments={"return_loss": True}, **_TOWERS),
        layouts=(WHOLE,),
    ),
    "batch-encoding": Row(
        job=_job(partial(a.hugging_face, "BertConfig", _MLM, **_TEXT), a.text, collate=a.collate_encoding)
    ),
}

OWN = {
    "unet": Row(job=_job(a.UNet, a.images), layouts=(PP2, PP4)),
    "nn-transformer": Row(job=_job(a.EncoderDecoder, a.sequences), layouts=(PP4,)),
    "residual-vit": Row(
        job=_job(a.ResidualViT, a.images), layouts=(PP2, PP4, Layout(pp=2, dp=2, zero=3, num_microbatches=2))
    ),
    "lstm": Row(job=_job(partial(a.Recurrent, nn.LSTM), a.token_pairs), layouts=(PP2, PP4)),
    "gru": Row(job=_job(partial(a.Recurrent, nn.GRU), a.token_pairs)),
    "unrolled-cell": Row(job=_job(a.UnrolledCell, a.sequences), layouts=(PP2, PP4)),
    "structures": Row(job=_job(a.Structures, a.sequences), layouts=(PP2, PP4)),
    "mixture": Row(
        job=_job(a.Mixture, a.sequences),
        layouts=(
            PP2,
            PP4,
            Layout(pp=2, dp=2, zero=3, num_microbatches=2),
            Layout(pp=2, tp=2, num_microbatches=2),
            Layout(pp=2, num_microbatches=4, schedule="interleaved"),
        ),
    ),
    "collected": Row(
        job=_job(a.Collected, a.sequences),
        layouts=(PP2, PP4, Layout(pp=2, dp=2, zero=3, num_microbatches=2)),
    ),
    "lora": Row(job=_job(a.Adapted, a.vectors), layouts=(PP2, PP4)),
    "parameterless": Row(job=_job(a.Parameterless, a.images)),
    "ties": Row(job=_job(a.Ties, a.token_pairs), layouts=(PP2, PP4)),
    "functions": Row(
        job=_job(partial(a.CustomFunctions, use_reentrant=False), a.sequences),
        layouts=(PP2, Layout(pp=2, dp=2, zero=3, num_microbatches=2)),
    ),
    "functions-reentrant": Row(job=_job(partial(a.CustomFunctions, use_reentrant=True), a.sequences)),
    "nested-batches": Row(job=_job(a.NestedBatches, a.named_text, collate=a.collate_examples, num_missing=1)),
    "last-batch-of-one": Row(job=_job(a.EncoderDecoder, a.sequences, num_missing=3)),
}

TABLE = {**HUGGING_FACE, **OWN}
CASES = [(name, layout) for name, row in TABLE.items() for layout in row.layouts]


@pytest.fixture(scope="module")
def references() -> dict[str, ReferenceRun]:
    """The runs of one process by name, filled as they are needed."""
    return {}


@pytest.mark.parametrize(("name", "layout"), CASES, ids=[f"{name}-{layout}" for name, layout in CASES])
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
