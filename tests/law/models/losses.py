"""Losses that weigh samples, or couple them, on one small model."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.law.models.row import COUPLED, Model
from tests.losses import LossNet, labelled
from tests.parity import Job

LOSSES = (
    *("mean", "summed", "ignoring", "class_weighted", "selected", "divided", "smoothed", "contrastive", "ctc"),
    *("balanced", "of_several_tasks", "element_weighted"),
)
"""Of tests/losses.py; all but the mean weigh samples, or couple them."""


class TwoViews(LossNet):
    """Has two views of each sample in one batch for the encoder, the second one tokens first, and then for the head."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        views = self(torch.cat([batch[0], batch[0].flip(-1)]))["pooled"]
        first, second = self.head(torch.cat([views, views[:, None].roll(1, -1)[:, 0]])).chunk(2)
        latent = F.normalize(first, dim=-1)
        same = torch.arange(len(first), device=first.device).roll(len(first) // 2)
        similar = (latent @ F.normalize(second, dim=-1).T / 0.2).fill_diagonal_(-1e4)
        loss, half = F.cross_entropy(similar, same), latent[: len(latent) // 2].sum()
        self.log_dict({"loss": loss, "first": half}, on_step=True, on_epoch=True, sync_dist=True)
        return {"loss": loss, "latent": latent}


class WarmedUp(LossNet):
    """Has a term that couples samples, with a weight that is zero at first, and a tensor."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        weight = torch.full((), 0.5 * self.global_step, device=batch[0].device)
        loss = self.loss(outputs, batch[1]) + weight * outputs["pooled"].std(0).mean()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def _row(name: str, net: type[LossNet] = LossNet) -> Model:
    job = Job(model=partial(net, name), data=labelled, num_val_batches=1)
    is_plain = net is not TwoViews
    skips = frozenset[str]() if is_plain else frozenset({"fp16"})
    return Model(
        job=job,
        traits=COUPLED,
        has_plain_step=is_plain,
        skips=skips,
        families=frozenset({"pp"}),
    )


MODELS = {
    **{f"loss-{name}": _row(name) for name in LOSSES},
    "loss-two-views": _row("mean", net=TwoViews),
    "loss-warmed-up": _row("mean", net=WarmedUp),
}
