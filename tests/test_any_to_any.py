"""Training that began in any layout goes on in any other as in one process: 144 pairs, of `make test-matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor

from lightning_3d.checkpoint.export import export_checkpoint
from tests.models import TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.workers import WorkerPools

LAYOUTS: dict[str, Layout | None] = {
    "plain": None,
    "dp2-zero0": Layout(dp=2, zero=0),
    "dp2-zero1": Layout(dp=2, zero=1, save_distributed_checkpoint=True),
    "dp2-zero2": Layout(dp=2, zero=2, save_distributed_checkpoint=True),
    "dp2-zero3": Layout(dp=2, zero=3, save_distributed_checkpoint=True),
    "tp2": Layout(tp=2),
    "tp2-sequence": Layout(tp=2, sequence_parallel=True, save_distributed_checkpoint=True),
    "pp2-gpipe": Layout(pp=2, schedule="gpipe", num_microbatches=4),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", num_microbatches=4, save_distributed_checkpoint=True),
    "pp2-zbv": Layout(pp=2, schedule="zbv", num_microbatches=4, save_distributed_checkpoint=True),
    "pp2-dp2-zero2": Layout(pp=2, dp=2, zero=2, save_distributed_checkpoint=True),
    "dp2-tp2-zero3": Layout(dp=2, tp=2, zero=3, save_distributed_checkpoint=True),
}
Progress = dict[str, Any]


class _Losses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["loss_step"]))


def _run(layout: Layout | None, epochs: int, begun: Path | None, saved: Path | None) -> Progress:
    losses = _Losses()
    trainer, _ = fitted(layout, TinyGPT, epochs=epochs, callbacks=[losses], ckpt_path=begun)
    if saved is not None:
        trainer.save_checkpoint(saved)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {"losses": losses.losses, "state": whole_state(trainer), "steps": trainer.global_step, "lr": rates}


def _run_anywhere(workers: WorkerPools, name: str, *args: Any) -> list[Progress]:
    layout = LAYOUTS[name]
    return [_run(None, *args)] if layout is None else workers(layout.world_size).run(_run, layout, *args)


@pytest.fixture(scope="module")
def uninterrupted() -> Progress:
    return _run(None, 2, None, None)


def _assert_goes_on(found: list[Progress], expected: Progress, where: str) -> None:
    for of_rank in found:
        assert of_rank["steps"] == expected["steps"], where
        assert of_rank["lr"] == expected["lr"], where
        assert of_rank["losses"] == pytest.approx(expected["losses"][-len(of_rank["losses"]) :], abs=1e-5), where
        assert len(of_rank["losses"]) == len(expected["losses"]) // 2, where
        state: dict[str, Tensor] = of_rank["state"]
        assert state.keys() == expected["state"].keys(), where
        for fqn, value in expected["state"].items():
            assert (state[fqn] - value).abs().max() <= 1e-5, f"{where}: {fqn}"


@pytest.mark.matrix
@pytest.mark.parametrize("source", LAYOUTS)
def test_training_goes_on_everywhere(
    workers: WorkerPools, tmp_path: Path, uninterrupted: Progress, source: str
) -> None:
    path = tmp_path / "begun.ckpt"
    _run_anywhere(workers, source, 1, None, path)
    for target in LAYOUTS:
        begun = path
        if target == "plain" and path.is_dir():
            begun = tmp_path / "exported.ckpt"
            export_checkpoint(path, begun, format="file")
        _assert_goes_on(_run_anywhere(workers, target, 2, begun, None), uninterrupted, f"{source} to {target}")
