"""Tiny models of transformers with random weights, as jobs of one process or of a layout."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
from torch import Tensor, nn

from tests.architectures import NUM_CLASSES, VOCABULARY, Trained, text
from tests.parity import Job

CLM, MLM, S2S = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
IMAGES = "AutoModelForImageClassification"


class HuggingFace(Trained):
    """A model of transformers on a dict of its arguments; it computes its own loss."""

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.arguments = arguments

    def compute_loss(self, batch: Mapping[str, Any]) -> Tensor:
        loss: Tensor = self.model(**batch, **self.arguments).loss
        return loss


def hugging_face(
    config: str, model_class: str, *, arguments: Mapping[str, Any] | None = None, **settings: Any
) -> HuggingFace:
    """Build a model from ``config(**settings)`` without dropout; ``arguments`` go with every batch."""
    transformers = importlib.import_module("transformers")
    configuration = getattr(transformers, config)(**settings)
    _disable_dropout(configuration)
    build = getattr(transformers, model_class)
    model = build.from_config(configuration) if model_class.startswith("Auto") else build(configuration)
    return HuggingFace(model.train(), arguments or {})


def recomputed(config: str, model_class: str, *, use_reentrant: bool, **settings: Any) -> HuggingFace:
    """The same with every layer checkpointed, which the layers do in a ``__call__`` of their own."""
    model = hugging_face(config, model_class, **settings)
    model.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})  # type: ignore[operator]
    return model


def _disable_dropout(config: Any) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or "mask_time" in name):
            setattr(config, name, 0.0)
        elif type(value).__name__.endswith("Config"):
            _disable_dropout(value)


def small_job(model: Callable[[], L.LightningModule], data: Any, **settings: Any) -> Job:
    """Global batches of 4 samples, one of them for validation."""
    return Job(model=model, data=data, global_batch_size=4, num_val_batches=1, **settings)


def hf_job(config: str, model_class: str, data: Any = text, **settings: Any) -> Job:
    """Such a job for ``config(**settings)``."""
    return small_job(partial(hugging_face, config, model_class, **settings), data)


def text_settings(*, width: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    """Of most configurations for text."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": 2 * width,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    }


def seq2seq_settings(*, width: int, num_heads: int) -> dict[str, Any]:
    """Of BART's kind, two layers each."""
    return {
        "vocab_size": VOCABULARY,
        "d_model": width,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": num_heads,
        "decoder_attention_heads": num_heads,
        "encoder_ffn_dim": 2 * width,
        "decoder_ffn_dim": 2 * width,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }


def image_settings(*, width: int, num_heads: int, num_layers: int) -> dict[str, Any]:
    """Of vision transformers."""
    return {
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "intermediate_size": 2 * width,
        "image_size": 16,
        "patch_size": 4,
        "num_labels": NUM_CLASSES,
    }
