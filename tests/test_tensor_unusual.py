"""Code in and around sharded blocks that has no sharded form is refused alike on all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import Block, TinyGPT
from tests.parity import Job, Layout, run_layout
from tests.workers import WorkerError, WorkerPools

TP2 = Layout(tp=2)


class SecondOrderLoss(TinyGPT):
    """A gradient of the gradient of the cross entropy."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.norm(self.tokens(batch[0])).detach().requires_grad_()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + gradient.square().sum()


class HookedParameter(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.norm.weight.register_hook(lambda gradient: 2 * gradient)


class SparseTable(TinyGPT):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.tokens.sparse = True


class SettingWeights(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mlp[0].weight.data = self.mlp[0].weight.data.clamp(-0.1, 0.1)
        return super().forward(x)


class SettingGPT(TinyGPT):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SettingWeights(32, 4) for _ in range(2))


REFUSED: list[tuple[Callable[[], TinyGPT], str]] = [
    (SecondOrderLoss, "gradients of gradients through a cross entropy on sharded logits are not built"),
    (HookedParameter, "norm.weight has gradient hooks, which would be lost"),
    (SparseTable, r"tokens is an Embedding\(sparse=True\)"),
    (SettingGPT, r"parameter.data = ... inside of a block"),
]


@pytest.mark.parametrize(("model", "message"), REFUSED, ids=[model.__name__ for model, _ in REFUSED])
def test_what_has_no_sharded_form_is_refused_on_all_ranks(
    workers: WorkerPools, model: Callable[[], TinyGPT], message: str
) -> None:
    with pytest.raises(WorkerError, match=message) as failed:
        run_layout(workers, Job(model=model), TP2)
    assert failed.value.failures.keys() == {0, 1}
