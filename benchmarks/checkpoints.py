"""Saving and loading against torch.distributed.checkpoint alone, and how long a save in the background holds up a run.

    python -m benchmarks.checkpoints [DIRECTORY [PROCESSES]]

A model of 100 million parameters in fp32 with the states of AdamW, 1.2 GB, sharded over the processes (one by default).
Ratios are of throughput: the time of `torch.distributed.checkpoint.save` and `load` of the same states to and from the
same file system, by the time that `Trainer.save_checkpoint` and a restart take for it, in turns, after what was written
before has reached the disk; files are in the page cache when they are read.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from rich.table import Table
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.launch import run_ranks
from benchmarks.models import Linears
from benchmarks.quiet_trainer import quiet_trainer
from lightning_3d import ThreeDStrategy
from lightning_3d.checkpoint.own_state import state_for_hooks

WIDTH, LAYERS, ROUNDS = 2048, 24, 6


class _Saving(Callback):
    """Times what is done after the last step but one, when all states are there."""

    def __init__(self, measure: Callable[[L.Trainer], Any]) -> None:
        self.measure = measure
        self.found: Any = None

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 1:
            self.found = self.measure(trainer)


def _fit(measure: Callable[[L.Trainer], Any], num_ranks: int, **checkpoint: Any) -> Any:
    torch.manual_seed(0)
    callback = _Saving(measure)
    zero = {"stage": 1 if num_ranks == 1 else 3}
    strategy = ThreeDStrategy(zero=zero, checkpoint=checkpoint, save_distributed_checkpoint=True)
    trainer = quiet_trainer(strategy, num_ranks, 2, callback)
    trainer.fit(Linears(WIDTH, LAYERS), DataLoader(TensorDataset(torch.randn(4 * num_ranks, WIDTH)), batch_size=2))
    return callback.found


def _timed(act: Callable[[], Any]) -> float:
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()
    begin = time.perf_counter()
    act()
    dist.barrier()
    return time.perf_counter() - begin


def _states(trainer: L.Trainer) -> dict[str, Any]:
    """The states, as torch alone saves them."""
    module, strategy = trainer.lightning_module, trainer.strategy
    assert isinstance(strategy, ThreeDStrategy)
    optimizers = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
    return {"model": state_for_hooks(module), "optimizer": optimizers[0]["state"]}


def _against_torch(folder: Path, trainer: L.Trainer) -> dict[str, list[float]]:
    states, ours, theirs = _states(trainer), folder / "ours.ckpt", folder / "theirs"
    strategy = trainer.strategy

    def restore() -> None:
        checkpoint = strategy.load_checkpoint(ours)
        strategy.load_model_state_dict(checkpoint)
        strategy.load_optimizer_state_dict(checkpoint)

    found: dict[str, list[float]] = {name: [] for name in ("save", "save by torch", "load", "load by torch")}
    acts = {
        "save by torch": partial(save, states, checkpoint_id=theirs),
        "save": lambda: trainer.save_checkpoint(ours),
        "load by torch": lambda: load(_with_new_optimizer(states), checkpoint_id=theirs),
        "load": restore,
    }
    for number in range(ROUNDS):
        if dist.get_rank() == 0:
            for path in (ours, theirs):
                shutil.rmtree(path, ignore_errors=True)
        for names in (("save by torch", "save"), ("load by torch", "load")):
            for name in names if number % 2 else reversed(names):  # a disk may slow down after a while
                found[name].append(_timed(acts[name]))
    written = sum(file.stat().st_size for file in ours.iterdir())
    num_bytes = _num_bytes(states)
    found["bytes"] = [written / num_bytes]
    found["size"] = [num_bytes]
    return found


def _with_new_optimizer(states: dict[str, Any]) -> dict[str, Any]:
    """Room for the states: the model's own, and new tensors for the optimizer's, which has none in a restart."""
    optimizer = {
        fqn: {n: torch.empty_like(v) for n, v in values.items()} for fqn, values in states["optimizer"].items()
    }
    return {"model": states["model"], "optimizer": optimizer}


def _num_bytes(states: dict[str, Any]) -> float:
    """Bytes of all tensors of all ranks, each once."""
    tensors = [*states["model"].values(), *(v for values in states["optimizer"].values() for v in values.values())]
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def _blocked(path: Path, trainer: L.Trainer) -> list[float]:
    """Seconds of each save but the first, which makes room for the copy; the one before is done then."""
    times = []
    for _ in range(ROUNDS + 1):
        times.append(_timed(lambda: trainer.save_checkpoint(path)))
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
    return times[1:]


def _measure(folder: Path, num_ranks: int) -> dict[str, list[float]]:
    found = _fit(partial(_against_torch, folder), num_ranks)
    for name, is_async in (("blocked", True), ("blocked at once", False)):
        found[name] = _fit(partial(_blocked, folder / "saved.ckpt"), num_ranks, async_save=is_async)
    return dict(found)


def main() -> None:
    """Print the table."""
    num_ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as folder:
        found = run_ranks(_measure, num_ranks, Path(folder), num_ranks)
    table = Table("", "ratio", "by round", "bar", title=f"{found['size'][0] / 1e9:.2f} GB on {num_ranks} processes")
    for name, one, other, bar in (
        ("throughput of saving to torch's", "save by torch", "save", "at least 0.95"),
        ("throughput of loading to torch's", "load by torch", "load", "at least 0.95"),
        ("a save in the background to one at once", "blocked", "blocked at once", "at most 0.20"),
    ):
        ratios = [a / b for a, b in zip(found[one], found[other], strict=True)]
        table.add_row(name, f"{statistics.median(ratios):.2f}", " ".join(f"{ratio:.2f}" for ratio in ratios), bar)
    table.add_row("bytes written to those of the tensors", f"{found['bytes'][0]:.4f}", "", "at most 1.02")
    Console().print(table)
    Console().print({name: f"{statistics.median(times):.2f} s" for name, times in found.items() if name[0] in "sbl"})


if __name__ == "__main__":
    main()
