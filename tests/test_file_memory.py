"""Single files are gathered while they are written: in the memory of one tensor, with the same content."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.models import TinyMLP, features, tokens, training_loader
from tests.parity import QUIET, Layout
from tests.tables import on_four_ranks, some_in_matrix
from tests.test_averaging import Model
from tests.workers import WorkerPools

LAYOUTS = [Layout(pp=2), Layout(dp=2, zero=1), Layout(dp=2, zero=3), Layout(tp=2), Layout(pp=2, dp=2, zero=3)]


class _Seeing(Callback):
    """A hook that may look at the checkpoint, so that it is whole at once."""

    def on_save_checkpoint(self, *args: Any) -> None:
        pass


def _saved(layout: Layout, path: Path, *callbacks: Callback) -> None:
    L.seed_everything(1, verbose=False)
    settings = {**QUIET, "max_steps": 2, "limit_val_batches": 0, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=layout.strategy(), devices=layout.world_size, callbacks=[*callbacks], **settings)
    trainer.fit(Model(), training_loader(tokens(16), global_batch_size=8, data_parallel_size=layout.dp))
    trainer.save_checkpoint(path)


def _in_both_ways(layout: Layout, folder: Path, is_averaged: bool) -> None:
    for name, callbacks in {"late": [], "whole": [_Seeing()]}.items():
        average = [WeightAveraging()] if is_averaged else []
        _saved(layout, folder / f"{name}.ckpt", *average, *callbacks)


def _assert_same(one: Any, other: Any, place: str = "") -> None:
    assert type(one) is type(other), place
    if isinstance(one, Tensor):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device), place
        assert torch.equal(one, other), place
    elif isinstance(one, dict):
        assert [*one] == [*other], place
        for key in one:
            _assert_same(one[key], other[key], f"{place}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for i, (first, second) in enumerate(zip(one, other, strict=True)):
            _assert_same(first, second, f"{place}[{i}]")
    else:
        assert one == other, place


@pytest.mark.parametrize(
    ("layout", "is_averaged"),
    some_in_matrix(
        [*((layout, False) for layout in LAYOUTS), (LAYOUTS[0], True), (LAYOUTS[2], True)],
        lambda layout, is_averaged: on_four_ranks(layout) or (is_averaged and layout.pp > 1),
    ),
)
def test_the_same_content(workers: WorkerPools, tmp_path: Path, layout: Layout, is_averaged: bool) -> None:
    workers(layout.world_size).run(_in_both_ways, layout, tmp_path, is_averaged)
    late, whole = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("late", "whole"))
    assert {"state_dict", "optimizer_states", "lr_schedulers"} <= late.keys()
    assert ("current_model_state" in late) == is_averaged
    assert [*late["optimizer_states"][0]["state"]] == [*range(len(late["optimizer_states"][0]["state"]))]
    _assert_same(late, whole)
    own = late["current_model_state" if is_averaged else "state_dict"]
    addresses = [{fqn: state[fqn].data_ptr() for fqn in state} for state in (own, whole["state_dict"])]
    tied = [[fqn for fqn in each if [*each.values()].count(each[fqn]) > 1] for each in addresses]
    assert is_averaged or tied[0] == tied[1] != []


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


@pytest.mark.parametrize(
    ("layout", "num_buffers"),
    [(Layout(pp=2), 1), (Layout(dp=2, zero=1), 1), (Layout(dp=2, zero=3), 3)],
)
def test_one_tensor_at_a_time(workers: WorkerPools, layout: Layout, num_buffers: int) -> None:
    """In an all-gather, gloo has a buffer of the size of the tensor, besides the tensor and the part of the rank."""
    beyond, own = workers(2).run(_peak, layout)[0]
    assert own > 20 * LARGEST
    assert beyond <= num_buffers * LARGEST + 0.1 * own + SLACK
