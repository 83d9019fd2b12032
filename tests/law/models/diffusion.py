"""Models of diffusers, whose configs are frozen mappings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests import architectures as a
from tests.hugging_face import small_job
from tests.law.models.row import Model

SIZE = 8
"""Of an image's sides."""


class Denoiser(a.Trained):
    """Learns the noise in images, given the time of it and a class."""

    def __init__(self, name: str, settings: Mapping[str, Any], *, has_classes: bool) -> None:
        super().__init__()
        self.model: nn.Module = getattr(diffusers, name)(**settings)
        self.has_classes = has_classes
        for module in self.model.modules():
            if isinstance(module, diffusers.models.embeddings.LabelEmbedding):
                module.dropout_prob = 0.0  # of classes, which would be others in every layout

    def compute_loss(self, batch: Any) -> Tensor:
        share = batch["time"].view(-1, 1, 1, 1) / 10
        noisy = (1 - share) * batch["image"] + share * batch["noise"]
        classes = {"class_labels": batch["class"]} if self.has_classes else {}
        return F.mse_loss(self.model(noisy, batch["time"], **classes).sample, batch["noise"])


def noisy_images(num_samples: int) -> Dataset[Any]:
    """``image`` and ``noise``, (3, SIZE, SIZE) float32, with a ``time`` and a ``class``."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(num_samples, 2, 3, SIZE, SIZE, generator=generator)
    return a.Samples(
        [
            {"image": image, "noise": noise, "time": torch.tensor(i % 10), "class": torch.tensor(i % a.NUM_CLASSES)}
            for i, (image, noise) in enumerate(images)
        ]
    )


_UNET = {
    "sample_size": SIZE,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 8,
    "norm_num_groups": 4,
}


_DIT = {
    "sample_size": SIZE,
    "patch_size": 2,
    "in_channels": 3,
    "out_channels": 3,
    "num_attention_heads": 4,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_embeds_ada_norm": a.NUM_CLASSES,
}


MODELS = {
    "diffusers-unet": Model(
        job=small_job(partial(Denoiser, "UNet2DModel", _UNET, has_classes=False), noisy_images),
        skips=frozenset({"adversaries"}),  # torch 2.13 crashes in one process
    ),
    "dit": Model(job=small_job(partial(Denoiser, "DiTTransformer2DModel", _DIT, has_classes=True), noisy_images)),
}
