"""Architectures by hand, whose dataflow is difficult: long skips, loops over positions, nested batches, ties."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import architectures as a
from tests.hugging_face import small_job
from tests.law.models.row import IN_HALVES, UNEVEN, Model
from tests.models import Block, TinyGPT, TinyMLP, features
from tests.parity import Job


class Normed(a.Trained):
    """Norms beside its layers, whose running statistics alone depend on how a batch is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a.WIDTH, a.WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(a.WIDTH, momentum=m) for m in (0.1, None, 0.1, 0.5))
        self.head = nn.Linear(a.WIDTH, a.NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(x).tanh() + 0 * norm(x)
        return F.mse_loss(self.head(x), batch[1])


class Drawing(Block):
    """Draws by Python and NumPy, and by generators of its own."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.of_numpy, self.of_torch = np.random.default_rng(4), torch.Generator().manual_seed(6)

    def forward(self, x: Tensor) -> Tensor:
        factor = random.random() + float(np.random.rand()) + self.of_numpy.random() if self.training else 1.0
        return x + factor * super().forward(x) + torch.rand((), generator=self.of_torch)


class Dropping(TinyGPT):
    """Drops what its blocks give, which draw."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Drawing(32, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = x + F.dropout(block(x), 0.3, self.training)
        logits: Tensor = self.head(self.norm(x))
        return logits


MODELS = {
    "gpt": Model(job=Job(num_val_batches=1)),
    "gpt-untied": Model(job=Job(model=partial(TinyGPT, tied=False), num_val_batches=1), alike="gpt"),
    "three-heads": Model(
        job=Job(model=partial(TinyGPT, width=24, num_heads=3), num_val_batches=1), families=frozenset({"tp"})
    ),
    "mlp": Model(job=Job(model=TinyMLP, data=features, num_val_batches=1)),
    "nn-transformer": Model(job=small_job(a.EncoderDecoder, a.sequences)),
    "unet": Model(job=small_job(a.UNet, a.images)),
    "residual-vit": Model(job=small_job(a.ResidualViT, a.images)),  # of 17 tokens, which no two ranks share evenly
    "lstm": Model(job=small_job(a.Recurrent, a.token_pairs), skips=IN_HALVES),
    "unrolled-cell": Model(job=small_job(a.UnrolledCell, a.sequences)),
    "structures": Model(job=small_job(a.Structures, a.sequences)),
    "mixture": Model(job=small_job(a.Mixture, a.sequences)),
    "collected": Model(  # changes views in place in glue, which can't be traced whole
        job=small_job(a.Collected, a.sequences), warns=("How what ",), skips=frozenset({"reads"})
    ),
    "lora": Model(job=small_job(a.Adapted, a.vectors)),
    "parameterless": Model(job=small_job(a.Parameterless, a.images)),
    "ties": Model(job=small_job(a.Ties, a.token_pairs)),
    "functions": Model(job=small_job(a.CustomFunctions, a.sequences), lr=0.01),
    "nested-batches": Model(
        job=small_job(a.NestedBatches, a.named_text, collate=a.collate_examples, num_missing=1), traits=UNEVEN
    ),
    "last-batch-of-one": Model(job=small_job(a.EncoderDecoder, a.sequences, num_missing=3), traits=UNEVEN),
    "norms": Model(job=Job(model=Normed, data=a.vectors, num_val_batches=1), traits=frozenset({"running statistics"})),
    "dropping": Model(job=Job(model=Dropping, num_val_batches=1), traits=frozenset({"draws"})),
}
