"""Memory that rank 0 needs to save a single file, beyond what it holds anyway.

    python -m benchmarks.file_memory [DIRECTORY]

A model of 13 million parameters in fp32 with the states of AdamW, 151 MB, on two processes. Each saves twice, as the
first save loads code, and what is shown is the second: the highest resident memory of rank 0 while it saves
(`VmHWM` of Linux, set back before) less that before.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.launch import run_ranks
from benchmarks.models import Linears
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy

WIDTH, LAYERS = 1024, 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2, ZeRO-1": {"zero": {"stage": 1}},
    "dp 2, ZeRO-3": {"zero": {"stage": 3}},
}


class _Saving(Callback):
    """Saves after the first step, when all states are there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, float] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.save_checkpoint(self.path)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what the first save has freed would serve the second
        dist.barrier()
        before = _bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        trainer.save_checkpoint(self.path)
        self.found = {"beyond": _bytes("VmHWM") - before, "own": _own_bytes(trainer)}


class _Seeing(_Saving):
    """A hook that looks at the checkpoint, for which it is whole at once."""

    def on_save_checkpoint(self, *args: Any) -> None:
        pass


def _own_bytes(trainer: L.Trainer) -> int:
    """Bytes of the parameters and states that this rank holds."""
    states = [each for optimizer in trainer.optimizers for each in optimizer.state.values()]
    tensors = [*trainer.lightning_module.parameters(), *(value for state in states for value in state.values())]
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.nbytes for tensor in local if not tensor.is_meta)


def _bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _measure(folder: Path, layout: dict[str, Any], *, is_whole: bool) -> dict[str, float]:
    torch.manual_seed(0)
    callback = (_Seeing if is_whole else _Saving)(folder / "saved.ckpt")
    trainer = quiet_trainer(ThreeDStrategy(save_distributed_checkpoint=False, **layout), 2, 1, callback)
    trainer.fit(Linears(WIDTH, LAYERS), DataLoader(TensorDataset(torch.randn(4, WIDTH)), batch_size=2))
    return callback.found


def main() -> None:
    """Print the table."""
    largest = WIDTH * WIDTH * 4
    title = f"MB beyond before; the largest tensor has {largest / 1e6:.1f} MB"
    table = Table("", "its own part", "a tensor at a time", "at most", "whole at once", title=title)
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        for name, layout in LAYOUTS.items():
            late, whole = (
                run_ranks(partial(_measure, is_whole=is_whole), 2, Path(folder), layout) for is_whole in (False, True)
            )
            figures = (late["own"], late["beyond"], largest + 0.1 * late["own"], whole["beyond"])
            table.add_row(name, *(f"{figure / 1e6:.1f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
