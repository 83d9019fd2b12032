"""Settings that differ between ranks are named on all of them, before anything is waited for."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_3d import ConfigError, ThreeDStrategy
from tests.models import TinyMLP, features, loader
from tests.workers import WorkerPools


class OnlyLooks(Callback):
    """May be on one rank alone."""


DIFFERING: dict[str, tuple[dict[str, Any], str]] = {
    "clipping": ({"gradient_clip_val": 1.0}, "Trainer(gradient_clip_val=...): None on rank 0, 1.0 on rank 1"),
    "accumulation": ({"accumulate_grad_batches": 2}, "Trainer(accumulate_grad_batches=...): 1 on rank 0, 2 on rank 1"),
    "steps": ({"max_steps": 3}, "Trainer(max_steps=...): 2 on rank 0, 3 on rank 1"),
    "checkpoints": (
        {"callbacks": [ModelCheckpoint(".")], "enable_checkpointing": True},
        "callbacks: none of these on rank 0, ModelCheckpoint{",
    ),
    "kind of checkpoint": ({"save_distributed_checkpoint": False}, "strategy: "),
}


def _fit(
    layout: dict[str, Any],
    *,
    save_distributed_checkpoint: bool = True,
    **flags: Any,
) -> int:
    settings = {"max_steps": 2, "enable_checkpointing": False, **flags}
    strategy = ThreeDStrategy(**layout, save_distributed_checkpoint=save_distributed_checkpoint)
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False, **settings
    )
    trainer.fit(TinyMLP(), loader(features(32), global_batch_size=8))
    return trainer.global_step


def _differ(layout: dict[str, Any]) -> dict[str, str]:
    """What every case raises."""
    messages = {}
    for name, (settings, _) in DIFFERING.items():
        with pytest.raises(ConfigError) as raised:
            _fit(layout, **(settings if dist.get_rank() == 1 else {}))
        messages[name] = str(raised.value)
    return messages


@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}], ids=["dp 2", "pp 2"])
def test_settings_that_differ_are_named_on_all_ranks(layout: dict[str, Any], workers: WorkerPools) -> None:
    first, second = workers(2).run(_differ, layout)
    assert first == second
    for name, (_, message) in DIFFERING.items():
        assert f"The ranks were given different settings: {message}" in first[name]


def _looks_on_one_rank() -> int:
    return _fit({}, callbacks=[OnlyLooks()] if dist.get_rank() == 0 else [])


def test_callbacks_that_only_look_may_differ(workers: WorkerPools) -> None:
    assert workers(2).run(_looks_on_one_rank) == [2, 2]
