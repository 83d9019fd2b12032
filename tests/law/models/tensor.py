"""What tensor parallel has to see through: blocks side by side that all get the same, so that a failure names one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests import architectures as a
from tests.hugging_face import small_job
from tests.law.models import convolutions as c
from tests.law.models import dropping as d
from tests.law.models import experts as e
from tests.law.models import spellings as b
from tests.law.models.compiled import Changed, Habits
from tests.law.models.row import COUPLED, IN_HALVES, LOOPS, NORMS, Family, Model, Trait
from tests.models import TinyGPT, features
from tests.parity import Job, Layout


class SideBySide(a.Trained):
    """Blocks behind one stem, each with a loss of its own."""

    def __init__(self, make: Callable[[], Mapping[str, nn.Module]], stem: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        if stem is None:  # code outside of blocks widens the data
            self.widening = nn.Parameter(torch.randn(a.WIDTH, 32) / 4)
        self.stem = nn.Identity() if stem is None else stem()
        self.blocks = nn.ModuleDict(make())

    def compute_loss(self, batch: Any) -> Tensor:
        x = self.stem(batch["pixel_values"] if isinstance(batch, dict) else batch[0])
        x = x @ self.widening if hasattr(self, "widening") else x
        losses = []
        for block in self.blocks.values():
            leaves = tree_leaves(block(x.clone()))
            losses += [(leaf - 0.5).square().mean() for leaf in leaves if isinstance(leaf, Tensor)]
        return torch.stack(losses).sum()


def matrices() -> dict[str, nn.Module]:
    return {
        **{separate.__name__: b.FusedQKV(separate) for separate in (b.by_view, b.by_head)},
        "low_rank": b.FusedLowRank(),
        "rotary": b.Rotary(),
        "einsum": b.EinsumAttention(),
        "doubling": b.Doubling(),
        "shifted": b.Shifted(),
        "linear": nn.Linear(32, 32),
    }


def mixtures() -> dict[str, nn.Module]:
    return {
        **{run.__name__: e.Stacked(run) for run in (e.by_number, e.by_mask)},
        "top_two": e.TopTwo(),
        "of_modules": e.Modules(),
        "starved": e.Modules(starved=True),
        "branching": e.Branching(),
        "scattered": e.Scattered(),
    }


def drops() -> dict[str, nn.Module]:
    classes = (d.Heads, d.Masked, d.Grouped, d.ByHand)
    return {
        **{block_class.__name__: block_class() for block_class in classes},
        "of_torch": d.OfTorch(need_weights=False),
        "of_torch_weights": d.OfTorch(need_weights=True),
        "encoder_layer": nn.TransformerEncoderLayer(32, 4, 64, dropout=d.P, batch_first=True),
    }


def images() -> dict[str, nn.Module]:
    return {"resnext": c.Bottleneck(16, groups=4), "resampling": c.Resampling()}


def sequences() -> dict[str, nn.Module]:
    return {"conformer": c.Conformer()}


class Penalized(TinyGPT):
    """Its loss has a penalty on gradients of its MLPs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(b.MLPBlock(32, 4) for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets = batch
        x = self.tokens(inputs).detach().requires_grad_()
        y = x
        for block in self.blocks:
            y = block(y)
        (gradient,) = torch.autograd.grad(y.square().mean(), x, create_graph=True)
        loss = F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()) + 1000 * gradient.square().sum()
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss


def _whole(layout: Layout) -> bool:
    return layout.pp == 1


def _in_place(layout: Layout) -> bool:
    """FSDP2 refuses blocks that change their arguments in place."""
    return layout.zero < 3


TP: frozenset[Family] = frozenset({"tp"})
DRAWS = frozenset[Trait]({"draws"})


def _row(make: Any, data: Any = a.sequences, stem: Any = None, **settings: Any) -> Model:
    return Model(job=small_job(partial(SideBySide, make, stem), data), families=TP, fits=_whole, **settings)


MODELS = {
    "odd-matrices": _row(matrices, lr=0.02),
    "linear-on-data": _row(
        lambda: {"linear": nn.Linear(32, 32)}, stem=partial(nn.Linear, a.WIDTH, 32), alike="odd-matrices"
    ),
    "experts": _row(mixtures, traits=COUPLED, skips=IN_HALVES | LOOPS, lr=0.02),
    "drops": _row(drops, traits=DRAWS, skips=frozenset({"gathered"})),
    "convolutions": _row(images, a.images, partial(nn.Conv2d, 3, 16, 4, 4), traits=NORMS, skips=IN_HALVES, lr=0.02),
    "conv-sequences": _row(sequences, stem=nn.Identity, traits=NORMS, skips=IN_HALVES, lr=0.02),
    "penalized": Model(job=Job(model=Penalized, num_val_batches=1), lr=0.003, families=TP, fits=_whole, traits=COUPLED),
    "changed-arguments": Model(
        job=Job(model=Changed, data=features, num_val_batches=1),
        lr=0.01,
        fits=_in_place,
        skips=frozenset({"inline", "manual", "adversaries"}),
    ),
    "habits": Model(job=Job(model=Habits, data=features, num_val_batches=1), families=TP, fits=_whole, traits=NORMS),
}
