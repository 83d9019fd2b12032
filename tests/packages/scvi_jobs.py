"""Training plans of scvi-tools around its variational autoencoders, on random counts of genes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning as L
import torch
from scvi.module import VAE
from scvi.train import TrainingPlan
from torch import Tensor
from torch.distributions import Normal
from torch.utils.data import Dataset

from tests.packages.parity import PackageJob, dict_samples

NUM_GENES = 24


def cells(num_samples: int) -> Dataset[Any]:
    """Counts of genes, with a batch and a label each."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.poisson(torch.full((num_samples, NUM_GENES), 4.0), generator=generator)
    return dict_samples(
        [{"X": count, "batch": torch.tensor([i % 2]), "labels": torch.tensor([0])} for i, count in enumerate(counts)]
    )


def vae(**settings: Any) -> L.LightningModule:
    module = VAE(NUM_GENES, n_batch=2, n_hidden=32, n_latent=8, n_layers=2, **settings)
    return TrainingPlan(module, n_epochs_kl_warmup=None)


@contextmanager
def same_noise_for_every_cell() -> Iterator[None]:
    """Have `Normal.rsample` take a noise that depends on the latent dimension alone, as layouts draw other numbers."""
    original = Normal.rsample

    def rsample(self: Normal, sample_shape: torch.Size = torch.Size()) -> Tensor:  # noqa: B008
        shape = self._extended_shape(sample_shape)
        return self.loc + self.scale * torch.linspace(-1, 1, shape[-1]).expand(shape)

    Normal.rsample = rsample  # type: ignore[method-assign]
    try:
        yield
    finally:
        Normal.rsample = original  # type: ignore[method-assign]


JOBS = {
    "SCVI": PackageJob(
        module=partial(vae, dropout_rate=0.0, use_batch_norm="none", use_layer_norm="both"),
        data=cells,
        environment=same_noise_for_every_cell,
    ),
}
