"""The copies that autocast makes of weights which tensor parallel shards, kept for all microbatches of a step."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.tensor.rules import contraction, convolution, projection
from lightning_3d.tensor.vocabulary import head_call, weight_roles
from lightning_3d.torch_internals import autocast
from tests.models import TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

READERS = (projection, convolution, contraction, head_call, weight_roles)


class _Block(nn.Module):
    """Reads weights once and several times, by different calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.experts = nn.Parameter(torch.randn(4, width, width) * 0.05)
        self.mix, self.unmix = nn.Conv1d(width, 2 * width, 3, padding=1), nn.Conv1d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(F.gelu(self.up(x)))
        x = x + torch.einsum("btd,edf->btf", x, self.experts) / 4
        return x + self.unmix(F.gelu(self.mix(x.mT))).mT


class _Varied(TinyGPT):
    """Has calls of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(32) for _ in range(4))


def _trained(layout: Layout, model: type[TinyGPT], *, keeps: bool) -> dict[str, Tensor]:
    with ExitStack() as stack:
        for reader in READERS if not keeps else ():
            stack.enter_context(mock.patch.object(reader, "as_autocast", lambda weight: weight))
        trainer, _ = fitted(layout, model, batches=2, epochs=1, limit_val_batches=0, precision="bf16-mixed")
    return whole_state(trainer)


def _different(layout: Layout, model: type[TinyGPT]) -> tuple[int, list[str]]:
    """The copies that were kept, and the weights that are not the same without them, to the bit."""
    with mock.patch.object(autocast._KeptCopy, "apply", side_effect=autocast._KeptCopy.apply) as read:
        kept = _trained(layout, model, keeps=True)
    made = _trained(layout, model, keeps=False)
    return read.call_count, [fqn for fqn in made if not torch.equal(kept[fqn], made[fqn])]


CASES = [
    (Layout(pp=2, tp=2, schedule="gpipe", num_microbatches=4), _Varied),
    (Layout(pp=2, tp=2, num_microbatches=4, activations={"recompute": "full"}), _Varied),
    (Layout(pp=2, tp=2, num_microbatches=4, sequence_parallel=True), TinyGPT),
]


@pytest.mark.parametrize(("layout", "model"), CASES)
def test_kept_copies_change_no_bit(workers: WorkerPools, layout: Layout, model: type[TinyGPT]) -> None:
    for num_read, different in workers(4).run(_different, layout, model):
        assert num_read
        assert different == []
