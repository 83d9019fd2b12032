"""States of other parameter groups are named, and not loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.optim import SGD

from lightning_3d import CheckpointError
from tests.models import TinyMLP, features
from tests.parity import Layout, fitted
from tests.workers import WorkerPools

trained = partial(fitted, data=features)


class Grouped(TinyMLP):
    """Has its parameters in this many groups."""

    def __init__(self, num_groups: int) -> None:
        super().__init__()
        self.num_groups = num_groups

    def configure_optimizers(self) -> Any:
        return SGD([{"params": list(self.parameters())[i :: self.num_groups]} for i in range(self.num_groups)], lr=0.01)


class Anew(Grouped):
    """Lets its optimizer begin anew."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


def _resumed(model: type[Grouped]) -> str | None:
    """Train with one group, go on with two; the error, if any."""
    layout = Layout(dp=2, save_distributed_checkpoint=True)
    trainer, _ = trained(layout, partial(Grouped, 1), epochs=1)
    trainer.save_checkpoint("first.ckpt")
    try:
        trained(layout, partial(model, 2), epochs=2, ckpt_path="first.ckpt")
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.parametrize("model", [Grouped, Anew])
def test_states_of_other_groups_are_refused(workers: WorkerPools, model: type[Grouped]) -> None:
    first, second = workers(2).run(_resumed, model)
    assert first == second
    assert (first is None) if model is Anew else (first is not None and "parameter groups" in first)
