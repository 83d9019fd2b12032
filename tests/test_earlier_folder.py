"""A folder that version 0.1.0 wrote, with fused weights, states and an average, is read as the file of the same run.

`earlier_folder.tar.xz` holds both, as two tensor-parallel ranks wrote them.
"""

from __future__ import annotations

import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn

from lightning_3d.checkpoint import export_checkpoint
from tests.models import TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.test_averaging import FusedAttention
from tests.test_export import _leaves
from tests.workers import WorkerPools


class Model(TinyGPT):
    """One block with a fused weight, and tied ones."""

    def __init__(self) -> None:
        super().__init__(width=8, num_heads=2, num_layers=1)
        (block,) = self.blocks
        assert isinstance(block, nn.Module)
        block.attention = FusedAttention(8, 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _write(path: Path) -> None:
    """Write them anew."""
    runs, _ = fitted(Layout(tp=2), Model, epochs=1, batches=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    for saved, is_folder in (("folder", True), ("file.ckpt", False)):
        runs.strategy._checkpoints._writes_folders = is_folder  # type: ignore[attr-defined]
        runs.save_checkpoint(path / saved)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("earlier_folder.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def _resumed(path: Path, layout: Layout) -> dict[str, Tensor]:
    average = EMAWeightAveraging(decay=0.5)
    trainer, _ = fitted(layout, Model, epochs=2, batches=2, callbacks=[average], ckpt_path=path)
    return whole_state(trainer)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_training_goes_on(workers: WorkerPools, earlier: Path, layout: Layout) -> None:
    from_folder, from_file = (workers(2).run(_resumed, earlier / name, layout) for name in ("folder", "file.ckpt"))
    assert_same_state(from_folder, from_file[0])


def test_it_is_exported(earlier: Path) -> None:
    export_checkpoint(earlier / "folder", earlier / "out.ckpt", format="file", optimizer_states=True)
    read = partial(torch.load, weights_only=True)
    torch.testing.assert_close(
        _leaves(read(earlier / "out.ckpt")), _leaves(read(earlier / "file.ckpt")), rtol=0, atol=0
    )
