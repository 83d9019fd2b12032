"""Models of transformers that compute their own loss, unmodified: labels padded by -100, contrastive, CTC."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tests.architectures import VOCABULARY, Samples
from tests.hugging_face import (
    CLM,
    MLM,
    S2S,
    HuggingFace,
    hugging_face,
    image_settings,
    seq2seq_settings,
    t5_settings,
    text_settings,
)
from tests.parity import Job, Layout, ReferenceRun, assert_parity, run_layout, run_reference
from tests.workers import WorkerPools

PIPELINE = Layout(pp=2, num_microbatches=4)
LAYOUTS = [
    PIPELINE,
    Layout(pp=2, tp=2, num_microbatches=2),
    *(Layout(pp=2, num_microbatches=4, schedule=s) for s in ("interleaved", "zbv")),  # type: ignore[arg-type]
]
IGNORED, NUM_TOKENS = -100, 10
_TEXT = text_settings(width=16, num_heads=2, num_layers=2)
_TOWERS = {
    "text_config": {**_TEXT, "bos_token_id": 1, "eos_token_id": 2},
    "vision_config": image_settings(width=16, num_heads=2, num_layers=2),
}
_SOUND = {
    "vocab_size": 12,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "feat_extract_norm": "layer",
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "ctc_zero_infinity": True,
}


def _texts(num_samples: int, *, valid: float = 1.0, num_labels: int = NUM_TOKENS) -> Dataset[Any]:
    """Padded token ids, and labels that are ignored where padded and in further places; all of them in some samples."""
    generator = torch.Generator().manual_seed(5)
    samples = []
    for i in range(num_samples):
        mask = (torch.arange(NUM_TOKENS) < torch.randint(4, NUM_TOKENS + 1, (), generator=generator)).long()
        ids = torch.randint(3, VOCABULARY, (NUM_TOKENS,), generator=generator) * mask
        is_valid = (torch.rand(NUM_TOKENS, generator=generator) < valid) & (mask == 1) & (i % 3 != 1)
        labels = ids.masked_fill(~is_valid, IGNORED)[:num_labels]
        samples.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return Samples(samples)


def _pairs(num_samples: int) -> Dataset[Any]:
    """Images with captions."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(3, VOCABULARY, (num_samples, NUM_TOKENS), generator=generator)
    images = torch.randn(num_samples, 3, 16, 16, generator=generator)
    return Samples([{"input_ids": ids[i], "pixel_values": images[i]} for i in range(num_samples)])


def _sounds(num_samples: int) -> Dataset[Any]:
    """Padded sounds with labels of several lengths."""
    generator = torch.Generator().manual_seed(7)
    samples = []
    for _ in range(num_samples):
        mask = (torch.arange(200) < torch.randint(120, 201, (), generator=generator)).long()
        labels = torch.randint(1, 12, (4,), generator=generator)
        labels[int(torch.randint(1, 5, (), generator=generator)) :] = IGNORED
        sound = torch.randn(200, generator=generator) * mask
        samples.append({"input_values": sound, "attention_mask": mask, "labels": labels})
    return Samples(samples)


class Hundredth(HuggingFace):
    """Trains a hundredth of a loss, for sums to be of order 1."""

    def compute_loss(self, batch: Mapping[str, Any]) -> Tensor:
        return super().compute_loss(batch) / 100


def _hundredth(*args: Any, **kwargs: Any) -> Hundredth:
    built = hugging_face(*args, **kwargs)
    return Hundredth(built.model, built.arguments)


def _model(
    config: str,
    model_class: str,
    data: Any,
    arguments: dict[str, Any] | None = None,
    *,
    build: Callable[..., HuggingFace] = hugging_face,
    **settings: Any,
) -> Job:
    model = partial(build, config, model_class, arguments=arguments, **settings)
    return Job(model=model, data=data, steps=2, num_val_batches=1)


_CONTRAST: dict[str, Any] = {"arguments": {"return_loss": True}}
JOBS = {
    "clip": _model("CLIPConfig", "AutoModel", _pairs, projection_dim=16, **_CONTRAST, **_TOWERS),
    "siglip": _model("SiglipConfig", "AutoModel", _pairs, **_CONTRAST, **_TOWERS),
    "ctc-sum": _model(
        "Wav2Vec2Config", "Wav2Vec2ForCTC", _sounds, ctc_loss_reduction="sum", build=_hundredth, **_SOUND
    ),
    "ctc-mean": _model("HubertConfig", "HubertForCTC", _sounds, ctc_loss_reduction="mean", **_SOUND),
    "causal": _model("LlamaConfig", CLM, _texts, **_TEXT),
    "causal-num-items": _model("LlamaConfig", CLM, _texts, {"num_items_in_batch": 40}, **_TEXT),
    "masked": _model("BertConfig", MLM, partial(_texts, valid=0.3), **_TEXT),
    "tokens": _model("BertConfig", "AutoModelForTokenClassification", _texts, num_labels=VOCABULARY, **_TEXT),
    "experts": _model(
        "MixtralConfig",
        CLM,
        _texts,
        {"output_router_logits": True},
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        **_TEXT,
    ),
    "bart": _model("BartConfig", S2S, partial(_texts, num_labels=7), **seq2seq_settings(width=16, num_heads=2)),
    "t5": _model("T5Config", S2S, partial(_texts, num_labels=7), **t5_settings()),
}
ALWAYS = ("clip", "siglip", "ctc-sum", "causal")


def _cases() -> list[Any]:
    cases = []
    for name in JOBS:
        for layout in LAYOUTS:
            marks = () if layout is PIPELINE and name in ALWAYS else pytest.mark.matrix
            cases.append(pytest.param(name, layout, id=f"{name}-{layout}", marks=marks))
    return cases


@cache
def _reference(name: str) -> ReferenceRun:
    return run_reference(JOBS[name])


@pytest.mark.parametrize(("name", "layout"), _cases())
def test_losses_of_transformers(name: str, layout: Layout, workers: WorkerPools) -> None:
    assert_parity(_reference(name), run_layout(workers, JOBS[name], layout))
