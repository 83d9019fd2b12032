"""Losses of many kinds behind one small model, by name: means over samples, and what is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

WIDTH, LENGTH, CLASSES = 16, 6, 5
IGNORED = -100

Outputs = Mapping[str, Tensor]
"""``logits`` (B, T, classes), ``pooled`` (B, width) and ``routing`` (layers, B, T, experts)."""


class Residual(nn.Module):
    """A residual MLP that also says where it would route, (B, T, D) -> (B, T, D), (B, T, experts)."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.mlp(x), self.router(x).softmax(-1)


def _flat(outputs: Outputs, labels: Tensor, **settings: Any) -> Tensor:
    return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), **settings)


def mean(outputs: Outputs, labels: Tensor) -> Tensor:
    return F.mse_loss(outputs["logits"], F.one_hot(labels.clamp(min=0), CLASSES).float())


def element_weighted(outputs: Outputs, labels: Tensor) -> Tensor:
    weight = torch.where(labels == IGNORED, 0.1, 1.0)[..., None].expand_as(outputs["logits"])
    target = F.one_hot(labels.clamp(min=0), CLASSES).float()
    return F.l1_loss(outputs["logits"], target, weight=weight) + 0.1 * F.l1_loss(
        outputs["logits"], 2 * target, reduction="sum", weight=weight
    )


def summed(outputs: Outputs, labels: Tensor) -> Tensor:
    return 0.1 * _flat(outputs, labels, reduction="sum")


def ignoring(outputs: Outputs, labels: Tensor) -> Tensor:
    return _flat(outputs, labels)


def class_weighted(outputs: Outputs, labels: Tensor) -> Tensor:
    return _flat(outputs, labels.clamp(min=0), weight=torch.linspace(0.5, 3, CLASSES, device=labels.device))


def selected(outputs: Outputs, labels: Tensor) -> Tensor:
    losses = _flat(outputs, labels, reduction="none")
    return losses[labels.flatten() != IGNORED].mean()


def divided(outputs: Outputs, labels: Tensor) -> Tensor:
    mask = (labels != IGNORED).float().flatten()
    return (_flat(outputs, labels, reduction="none") * mask).sum() / mask.sum()


def smoothed(outputs: Outputs, labels: Tensor) -> Tensor:
    return _flat(outputs, labels, label_smoothing=0.2)


def contrastive(outputs: Outputs, labels: Tensor) -> Tensor:
    z = F.normalize(outputs["pooled"], dim=-1)
    logits = z @ F.normalize(outputs["logits"].mean(1) @ z.new_ones(CLASSES, WIDTH).tril(), dim=-1).T / 0.1
    targets = torch.arange(len(z), device=z.device)
    return (F.cross_entropy(logits, targets) + F.cross_entropy(logits.T, targets)) / 2


def ctc(outputs: Outputs, labels: Tensor, reduction: str = "sum") -> Tensor:
    log_probs = outputs["logits"].log_softmax(-1).transpose(0, 1)
    lengths = torch.full((len(labels),), LENGTH)
    return 0.1 * F.ctc_loss(log_probs, labels[:, :2].clamp(min=1), lengths, lengths // 3, reduction=reduction)


def balanced(outputs: Outputs, labels: Tensor) -> Tensor:
    routing = outputs["routing"].flatten(0, 2)
    hits = F.one_hot(routing.argmax(-1), 3).float().mean(0)
    return mean(outputs, labels) + 3 * (hits * routing.mean(0)).sum()


def of_several_tasks(outputs: Outputs, labels: Tensor) -> Tensor:
    return _flat(outputs, labels) + mean(outputs, labels)


LOSSES: dict[str, Callable[[Outputs, Tensor], Tensor]] = {
    function.__name__: function
    for function in (
        mean,
        element_weighted,
        summed,
        ignoring,
        class_weighted,
        selected,
        divided,
        smoothed,
        contrastive,
        ctc,
        balanced,
        of_several_tasks,
    )
}


class LossNet(L.LightningModule):
    """A model with a loss; a batch is `(features, labels)`, (B, T, 8) float32 and (B, T) int64.

    Args:
        replicas: In one process, the data-parallel ranks of the layout that it stands for: each takes every so manieth
            sample, and the loss is the mean of theirs, as under DDP.
    """

    def __init__(self, loss: str, replicas: int = 1) -> None:
        super().__init__()
        self.loss, self.replicas = LOSSES[loss], replicas
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(Residual() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, routing = self.first(x), []
        for block in self.blocks:
            x, route = block(x)
            routing.append(route)
        x = self.norm(x)
        return {"logits": self.head(x), "pooled": x.mean(1), "routing": torch.stack(routing)}

    def _numbers(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {"loss": [], "accuracy": [], "squashed": []}
        for rank in range(self.replicas):
            features, labels = (tensor[rank :: self.replicas] for tensor in batch)
            outputs = self(features)
            found["loss"].append(self.loss(outputs, labels))
            hits = (outputs["logits"].argmax(-1) == labels).sum()
            found["accuracy"].append(hits / (labels != IGNORED).sum())
            found["squashed"].append(found["loss"][-1].detach().tanh())
        return {name: torch.stack(values).mean() for name, values in found.items()}

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        numbers = self._numbers(batch)
        self.log("loss", numbers["loss"], on_step=True, on_epoch=True, sync_dist=True)
        self.log_dict({"accuracy": numbers["accuracy"], "squashed": numbers["squashed"]}, sync_dist=True)
        return numbers["loss"]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log_dict({f"val_{name}": value for name, value in self._numbers(batch).items()}, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def labelled(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    """Features and labels; a third of these are ignored, and in many samples all: some microbatches have none."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(num_samples, LENGTH, 8, generator=generator)
    labels = torch.randint(1, CLASSES, (num_samples, LENGTH), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 1 / 3] = IGNORED
    labels[torch.rand(num_samples, generator=generator) < 0.4] = IGNORED
    return TensorDataset(features, labels)
