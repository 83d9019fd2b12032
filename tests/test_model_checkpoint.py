"""``ModelCheckpoint`` in all its modes leaves the names that plain Lightning leaves, with the same weights in each."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.models import TinyGPT, loader, tokens
from tests.parity import Layout, assert_same_state, fitted
from tests.workers import WorkerPools

MODES: dict[str, dict[str, Any]] = {
    "least": {"monitor": "val_loss", "save_top_k": 2, "filename": "{epoch}-{val_loss:.1f}"},
    "last": {"save_last": True},
    "link": {"save_last": "link", "monitor": "val_loss"},
    "steps": {"every_n_train_steps": 3, "save_top_k": -1},
    "time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "weights": {"save_weights_only": True, "save_last": True},
    "exception": {"save_on_exception": True, "save_last": "link", "every_n_train_steps": 1000},
}
_model = partial(TinyGPT, num_layers=2)


class _Fails(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            raise ValueError("enough")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What a run leaves."""

    names: dict[str, str | None]
    """Names in the folder, with what they link to."""
    best: str
    last: str
    weights: dict[str, dict[str, Tensor]]
    """Of each checkpoint."""
    evaluated: dict[str, float]
    """By the best one, in a mode."""


def run(mode: str, layout: Layout | None) -> Kept:
    folder = Path(mode)
    keeps = ModelCheckpoint(folder, **MODES[mode])
    settings: dict[str, Any] = {"batches": 3, "enable_checkpointing": True}
    if mode == "exception":
        with pytest.raises(ValueError, match="enough"):
            fitted(layout, _model, callbacks=[keeps, _Fails()], **settings)
    else:
        trainer, module = fitted(layout, _model, callbacks=[keeps], **settings)
    evaluated: dict[str, Any] = {}
    if mode == "least":
        data = loader(tokens(16, seed=1), global_batch_size=8, data_parallel_size=1 if layout is None else layout.dp)
        (evaluated,) = trainer.validate(module, data, ckpt_path="best", verbose=False, weights_only=False)
    if layout is not None:
        torch.distributed.barrier()
    names = {path.name: os.readlink(path) if path.is_symlink() else None for path in sorted(folder.iterdir())}
    loaded = {name: TinyGPT.load_from_checkpoint(folder / name, num_layers=2).state_dict() for name in names}
    return Kept(
        names=names,
        best=Path(keeps.best_model_path).name,
        last=Path(keeps.last_model_path).name,
        weights=loaded,
        evaluated={name: round(value, 4) for name, value in evaluated.items()},
    )


def run_all(layout: Layout | None, modes: Sequence[str] = tuple(MODES)) -> dict[str, Kept]:
    return {mode: run(mode, layout) for mode in modes}


@pytest.fixture(scope="module")
def expected(workers: WorkerPools) -> dict[str, Kept]:
    """Of one process."""
    return workers(1).run(run_all, None)[0]


LAYOUTS = {"dp2": Layout(dp=2), "zero3": Layout(dp=2, zero=3), "pp2": Layout(pp=2), "tp2": Layout(tp=2)}
IN_FOLDERS = ("least", "link", "exception")
"""Modes that `make test` has in folders, too."""


def _layout(name: str, kind: str) -> Layout:
    return replace(LAYOUTS[name], save_distributed_checkpoint=kind == "folder")


@pytest.mark.parametrize(
    ("name", "kind", "modes"),
    [
        ("dp2", "file", tuple(MODES)),
        ("pp2", "folder", IN_FOLDERS),
        pytest.param("zero3", "folder", tuple(MODES), marks=pytest.mark.matrix),
        pytest.param("tp2", "file", tuple(MODES), marks=pytest.mark.matrix),
    ],
)
def test_all_modes_leave_the_checkpoints_of_one_process(
    workers: WorkerPools, expected: dict[str, Kept], name: str, kind: str, modes: Sequence[str]
) -> None:
    assert all(kept.names for kept in expected.values())
    for found in workers(2).run(run_all, _layout(name, kind), modes, timeout=280):
        assert found.keys() == set(modes)
        for mode, kept in found.items():
            assert replace(kept, weights={}) == replace(expected[mode], weights={})
            for checkpoint, weights in expected[mode].weights.items():
                assert_same_state([kept.weights[checkpoint]], weights)
