"""Single files are gathered while they are written: in the memory of one tensor, with the same content."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch.distributed.tensor import DTensor

from tests.models import TinyMLP, features, training_loader
from tests.parity import QUIET, Layout
from tests.workers import WorkerPools


class _Peak(Callback):
    """Bytes that a save needs at most, beyond those before; and what this rank holds of the training state."""

    beyond = own = 0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        path = trainer.strategy.broadcast("saved.ckpt")
        trainer.save_checkpoint(path)  # the first loads code
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what it has freed would serve the second
        dist.barrier()
        before = _bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        trainer.save_checkpoint(path)
        self.beyond = _bytes("VmHWM") - before
        states = [value for opt in trainer.optimizers for state in opt.state.values() for value in state.values()]
        tensors = [*trainer.lightning_module.parameters(), *states]
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        self.own = sum(tensor.nbytes for tensor in local if not tensor.is_meta)


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


WIDTH, NUM_LAYERS = 1024, 15
LARGEST = WIDTH * WIDTH * 4
SLACK = 2**20
"""Bytes that a process allocates besides tensors."""


def _peak(layout: Layout) -> tuple[int, int]:
    peak = _Peak()
    settings = {**QUIET, "max_steps": 1, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=layout.strategy(), devices=2, callbacks=[peak], **settings)
    data = training_loader(features(8), global_batch_size=4, data_parallel_size=layout.dp)
    trainer.fit(TinyMLP(width=WIDTH, num_layers=NUM_LAYERS), data)
    return peak.beyond, peak.own


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3)], ids=str)
def test_one_tensor_at_a_time(workers: WorkerPools, layout: Layout) -> None:
    beyond, own = workers(2).run(_peak, layout)[0]
    assert own > 20 * LARGEST
    assert beyond <= LARGEST + 0.1 * own + SLACK
