"""Blocks whose hidden features are read and changed in odd ways, which shards of tensors have to follow."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests import architectures as a
from tests.hugging_face import small_job
from tests.law.models.row import IN_HALVES, Model

Between = Callable[["Odd", Tensor], Tensor]


class Odd(nn.Module):
    """A column and a row weight, with a function of the hidden features between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(a.WIDTH, 4 * a.WIDTH), nn.Linear(4 * a.WIDTH, a.WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.between(self, x)) + x
        return self.down(self.between(self, y)).tanh() + y


def read_without_gradient_first(block: Odd, x: Tensor) -> Tensor:
    """What was gathered without gradient was read again with one."""
    with torch.no_grad():
        scale = block.up(x).mean(-1, keepdim=True)
    return block.up(x) * scale  # type: ignore[no-any-return]


def read_under_autocast_first(block: Odd, x: Tensor) -> Tensor:
    """Likewise in bf16."""
    with torch.autocast(x.device.type, torch.bfloat16):
        block.up(x)
    return block.up(x)  # type: ignore[no-any-return]


def scanned(block: Odd, x: Tensor) -> Tensor:
    """Every rank scanned its own features alone."""
    return 0.1 * block.up(x).cumsum(-1)  # type: ignore[no-any-return]


def biased_by_row(block: Odd, x: Tensor) -> Tensor:
    """One rank cut a bias of one column, the others failed."""
    rows = x.flatten(0, 1)
    return torch.addmm(rows.mean(-1, keepdim=True), rows, block.up.weight.t()).unflatten(0, x.shape[:2])


def biased_by_number(block: Odd, x: Tensor) -> Tensor:
    return torch.addmm(torch.tensor(2.0, device=x.device), x.flatten(0, 1), block.up.weight.t()).unflatten(
        0, x.shape[:2]
    )


BETWEEN: tuple[Between, ...] = (
    read_without_gradient_first,
    read_under_autocast_first,
    scanned,
    biased_by_row,
    biased_by_number,
)


class OddViews(a.Trained):
    """A block for each oddity."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({between.__name__: Odd(between) for between in BETWEEN})
        self.head = nn.Linear(a.WIDTH, a.NUM_CLASSES)

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0]
        for block in self.blocks.values():
            x = F.layer_norm(block(x), x.shape[-1:])
        return F.mse_loss(self.head(x), batch[1])


MODELS = {"odd-views": Model(job=small_job(OddViews, a.sequences), skips=IN_HALVES, lr=0.02)}
