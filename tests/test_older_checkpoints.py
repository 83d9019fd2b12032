"""Checkpoints of an older version: a run goes on from them as if it had not stopped, in any layout.

``older/checkpoints.tar.xz`` has a folder and a file of commit ea820e0, of the run below in pipeline 2 after 3 steps.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from tests.models import TinyMLP, features
from tests.parity import QUIET, Layout, assert_same_state, whole_state
from tests.workers import WorkerPools

ARCHIVE = Path(__file__).parent / "older" / "checkpoints.tar.xz"


def _trained(layout: Layout | None, path: Path | None = None) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    strategy: Any = "auto" if layout is None else layout.strategy()
    devices = 1 if layout is None else 2
    trainer = L.Trainer(devices=devices, strategy=strategy, max_steps=6, enable_checkpointing=False, **QUIET)
    trainer.fit(TinyMLP(), DataLoader(features(64), 8, shuffle=True), DataLoader(features(16), 8), ckpt_path=path)
    return whole_state(trainer)


@pytest.mark.parametrize("name", ["folder.ckpt", "file.ckpt"])
def test_a_run_goes_on(workers: WorkerPools, tmp_path: Path, name: str) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    expected = _trained(None)
    for layout in (Layout(pp=2), Layout(tp=2)):
        assert_same_state(workers(2).run(_trained, layout, tmp_path / name), expected)
