"""Stage 3: code that reads parameters where their unit is not gathered trains as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from tests.models import ADAM_EPS, TinyGPT, tokens
from tests.parity import Job, Layout, run_layout
from tests.workers import WorkerError, WorkerPools


class Model(TinyGPT):
    """A small GPT; each class below makes some use of its parts beside calling blocks."""

    def __init__(self) -> None:
        super().__init__(num_layers=2, width=16, tied=False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=ADAM_EPS)


class ValidatesOtherwise(Model):
    """Reads in validation what training does not."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        if not self.training:
            x = self.blocks[0].mlp(x) + x @ self.blocks[0].mlp[0].weight.T.mean(1, keepdim=True)  # type: ignore[index,operator,union-attr]
        logits: Tensor = self.head(self.norm(x))
        return logits


def _job(model: Callable[[], L.LightningModule]) -> Job:
    return Job(model=model, data=tokens, num_val_batches=1, gradient_clip_val=0.5)


def test_validation_that_reads_a_block_of_another_stage_is_refused(workers: WorkerPools) -> None:
    message = r"Pipeline stage 1: linear .* reads blocks.0.mlp.0.weight, of a block on another"
    with pytest.raises(WorkerError, match=message):
        run_layout(workers, _job(ValidatesOtherwise), Layout(pp=2))
