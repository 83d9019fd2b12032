"""Heads and their losses: what a loss without logits has to see through, and tables that serve as heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.law.models.row import Model
from tests.models import TinyGPT, tokens
from tests.parity import Job


class Shifted(TinyGPT):
    """A head with a bias, and a loss with all that fusing must see through."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tied=False, **options)
        vocabulary, width = self.tokens.weight.shape
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, _ = batch
        logits = self(inputs)
        shifted, targets = logits[..., :-1, :].float().contiguous() / 0.8, inputs[..., 1:]
        weight = torch.linspace(0.5, 1.5, logits.shape[-1], device=self.device)
        loss = F.cross_entropy(
            shifted.view(-1, logits.size(-1)),
            targets.flatten(),
            weight,
            reduction="sum",
            ignore_index=3,
            label_smoothing=0.1,
        )
        loss = loss / targets.numel()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class ByRow(TinyGPT):
    """Its loss is a weighted mean of losses by row, made by a module."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.criterion = nn.CrossEntropyLoss(reduction="none")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        losses = self.criterion(self(inputs).transpose(1, 2), targets)
        loss = (losses * torch.linspace(0.5, 1.5, losses.shape[1], device=losses.device)).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class Logs(TinyGPT):
    """Gives logarithms of probabilities."""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.log_softmax(super().forward(tokens).float(), dim=-1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        logs = self(inputs)
        weight = torch.linspace(0.5, 1.5, logs.shape[-1], device=self.device)
        loss = F.nll_loss(logs.view(-1, logs.size(-1)), targets.flatten(), weight, ignore_index=3, reduction="sum")
        loss = loss / targets.numel()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logs = self(batch[0]).flatten(0, 1)
        self.log("val_loss", nn.NLLLoss()(logs, batch[1].flatten()), sync_dist=True)
        self.log("val_entropy", -(logs.exp() * logs).sum(-1).mean(), sync_dist=True)


class Uncommon(TinyGPT):
    """All that vocabulary parallel must see through: padding, a head's bias, shifted and smoothed loss, a z-loss."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tied=False, **options)
        vocabulary, width = self.tokens.weight.shape
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=3)
        self.head = nn.Linear(width, vocabulary)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, _ = batch
        logits = self(inputs)
        shifted, targets = logits[..., :-1, :].float().contiguous(), inputs[..., 1:]
        weight = torch.linspace(0.5, 1.5, logits.shape[-1], device=self.device)
        flat, keywords = shifted.view(-1, logits.size(-1)), {"ignore_index": 3, "label_smoothing": 0.1}
        # Not the mean: of microbatches, the means over what is counted are not the mean of the batch.
        loss = F.cross_entropy(flat, targets.flatten(), weight, reduction="sum", **keywords) / targets.numel()
        loss = loss + 1e-2 * logits.logsumexp(-1).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


ODD = partial(tokens, vocabulary=61)
"""A vocabulary that neither 2 nor 4 divides."""


class Masking(TinyGPT):
    """Changes its logits in place."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        logits[..., 5:7].sub_(10.0)
        loss = F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


class ByTable(TinyGPT):
    """Multiplies with its table of tokens, outside of blocks."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tied=True, **options)
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten())
        again = self.tokens(inputs).tanh() @ self.tokens.weight.T
        loss = loss + 0.1 * F.cross_entropy(again.flatten(0, 1), targets.flatten(), label_smoothing=0.1)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits = self(batch[0]).flatten(0, 1)
        self.log("val_loss", F.cross_entropy(logits, batch[1].flatten()), sync_dist=True)
        self.log("val_read", logits.softmax(-1).square().mean(), sync_dist=True)


def _row(model: Any, data: Any = tokens, **settings: Any) -> Model:
    return Model(job=Job(model=model, data=data, num_val_batches=1), **settings)


MODELS = {
    "odd-vocabulary": _row(partial(TinyGPT, vocabulary=61), ODD),
    "odd-head": _row(partial(Uncommon, vocabulary=61), ODD),
    "shifted-loss": _row(partial(Shifted, vocabulary=61), ODD),
    "loss-by-row": _row(partial(ByRow, tied=False)),
    "log-softmax": _row(partial(Logs, tied=False)),
    "masked-logits": _row(Masking, families=frozenset({"tp"})),
    "table": _row(ByTable),
}
