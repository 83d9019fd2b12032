"""Models of transformers that compute their own loss, unmodified: labels padded by -100, contrastive, CTC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

from tests.architectures import VOCABULARY, Samples
from tests.hugging_face import CLM, MLM, hf_job, image_settings, text_settings
from tests.law.models.row import COUPLED, Model
from tests.parity import Layout

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


def _model(
    config: str,
    model_class: str,
    data: Any,
    *,
    lr: float = 0.1,
    alike: str | None = None,
    skips: frozenset[str] = frozenset(),
    fits: Callable[[Layout], bool] = lambda layout: True,
    **settings: Any,
) -> Model:
    job = hf_job(config, model_class, data, **settings)
    return Model(job=job, lr=lr, alike=alike, skips=skips, fits=fits, traits=COUPLED, families=frozenset({"pp"}))


MODELS = {
    "siglip": _model("SiglipConfig", "AutoModel", _pairs, arguments={"return_loss": True}, **_TOWERS),
    "ctc-mean": _model("HubertConfig", "HubertForCTC", _sounds, ctc_loss_reduction="mean", **_SOUND),
    "llama-padded": _model("LlamaConfig", CLM, _texts, **_TEXT),
    "llama-num-items": _model("LlamaConfig", CLM, _texts, arguments={"num_items_in_batch": 40}, **_TEXT),
    "bert-padded": _model("BertConfig", MLM, partial(_texts, valid=0.3), **_TEXT),
    "mixtral-padded": _model(
        "MixtralConfig",
        CLM,
        _texts,
        arguments={"output_router_logits": True},
        skips=frozenset({"plateau"}),  # late steps send tokens to other experts by rounding
        fits=lambda layout: layout.pp < 4,  # a microbatch of one sample may have no label at all
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        **_TEXT,
    ),
}
