"""Small LightningModules, idiomatic and unaware of parallelism, and fixed data for them.

All of them are built from a seed (`build(TinyGPT)`), so that every layout starts from the weights of one process, and
none of them draws random numbers while training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

ADAM_EPS = 1e-3
"""AdamW's eps. The bias of K has a true gradient of 0 (softmax ignores a shift), which a small eps turns into noise."""


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) -> (B, T, D), with separate projections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = (batch, length, self.num_heads, width // self.num_heads)
        q, k, v = (projection(x).view(split).transpose(1, 2) for projection in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return output


class Block(nn.Module):
    """Pre-norm transformer block, (B, T, D) -> (B, T, D)."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


def warmed_up_adamw(module: nn.Module, lr: float, num_warmup_steps: int) -> OptimizerLRSchedulerConfig:
    """AdamW whose learning rate rises linearly over the first steps."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.1, eps=ADAM_EPS)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / num_warmup_steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TinyGPT(L.LightningModule):
    """Next-token prediction; a batch is `(inputs, targets)`, both (B, T) int64."""

    def __init__(
        self,
        vocabulary: int = 64,
        context: int = 16,
        width: int = 32,
        num_heads: int = 4,
        num_layers: int = 4,
        tied: bool = True,
        lr: float = 1e-2,
        num_warmup_steps: int = 2,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.num_warmup_steps = num_warmup_steps
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)  # the default of 1 is far too much for the weights of a head
        if tied:
            self.head.weight = self.tokens.weight
        self.accuracy = MulticlassAccuracy(vocabulary, average="micro")

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        logits = self(inputs).flatten(0, 1)
        self.accuracy(logits, targets.flatten())
        self.log("val_loss", F.cross_entropy(logits, targets.flatten()), sync_dist=True, batch_size=len(inputs))
        self.log("val_accuracy", self.accuracy, batch_size=len(inputs))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return warmed_up_adamw(self, self.lr, self.num_warmup_steps)


class LogsLoss(TinyGPT):
    """Logs nothing that ranks share."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss


class TinyMLP(L.LightningModule):
    """Regression by a Sequential; a batch is `(features, targets)`, (B, 8) and (B, 4) float32."""

    def __init__(self, width: int = 32, num_layers: int = 4, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        hidden = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)]
        self.layers = nn.Sequential(nn.Linear(8, width), *hidden, nn.Linear(width, 4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        features, targets = batch
        loss = F.mse_loss(self(features), targets)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        features, targets = batch
        self.log("val_loss", F.mse_loss(self(features), targets), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=ADAM_EPS)


class Regression(L.LightningModule):
    """Regression by the forward of a subclass; a batch is `(features, targets)`, (B, 8) and (B, 4) float32."""

    lr = 0.1

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tokens(num_samples: int, *, vocabulary: int = 64, context: int = 16, seed: int = 0) -> Dataset[tuple[Tensor, ...]]:
    """Fixed random sequences as `(inputs, targets)`, each (context,) int64, targets shifted by one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(vocabulary, (num_samples, context + 1), generator=generator)
    return TensorDataset(drawn[:, :-1], drawn[:, 1:])


def features(num_samples: int, *, seed: int = 0) -> Dataset[tuple[Tensor, ...]]:
    """Fixed random `(features, targets)`, (8,) and (4,) float32, for TinyMLP."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(num_samples, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].sin())


def loader(
    dataset: Dataset[tuple[Tensor, ...]],
    *,
    global_batch_size: int,
    data_parallel_size: int = 1,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of one data-parallel rank, without shuffling where the Trainer adds no sampler.

    Lightning's DistributedSampler gives rank r the samples r, r + dp, ... of its order, so the union of the ranks'
    batches is the same global batch for every data-parallel size, and the mean over equal parts is the global mean.
    For training its order is always shuffled: compare with `reference_loader`.
    """
    if global_batch_size % data_parallel_size:
        raise ValueError(f"global batch size {global_batch_size} is not divisible by {data_parallel_size} ranks")
    return DataLoader(dataset, batch_size=global_batch_size // data_parallel_size, collate_fn=collate)


def reference_loader(
    dataset: Dataset[tuple[Tensor, ...]],
    *,
    global_batch_size: int,
    seed: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[tuple[Tensor, ...]]:
    """One process's training batches, in the order of the sampler that Lightning adds in distributed runs."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, num_replicas=1, rank=0, seed=seed)
    return DataLoader(dataset, batch_size=global_batch_size, sampler=sampler, collate_fn=collate)


def training_loader(
    dataset: Dataset[tuple[Tensor, ...]],
    *,
    global_batch_size: int,
    data_parallel_size: int,
    seed: int = 1,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[tuple[Tensor, ...]]:
    """Training batches of one data-parallel rank of a layout, in the order of `reference_loader`.

    Lightning leaves the order of a single replica alone, which is then given that one.
    """
    if data_parallel_size == 1:
        return reference_loader(dataset, global_batch_size=global_batch_size, seed=seed, collate=collate)
    return loader(dataset, global_batch_size=global_batch_size, data_parallel_size=data_parallel_size, collate=collate)
