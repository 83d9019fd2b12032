"""Optimizers that need whole parameters step them where they are cut: as in one process, each on one rank.

In fp64, as Newton-Schulz iterations make much of rounding; the law has others, with runs that are resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon
from torch.optim.lr_scheduler import StepLR

from tests.law.models.spellings import FusedQKV
from tests.models import TinyGPT, tokens
from tests.optimizers import MuonByHand, Shampoo
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() == 2]


def _others(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.dim() != 2]


def _grouped(model: nn.Module) -> Any:
    groups = [{"params": _matrices(model), "is_matrix": True}, {"params": _others(model), "is_matrix": False}]
    optimizer = MuonByHand(groups, lr=1e-2)
    return [optimizer], [{"scheduler": StepLR(optimizer, 1, gamma=0.5), "interval": "step"}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "two": lambda model: [Muon(_matrices(model), lr=1e-2), AdamW(_others(model), eps=1e-3)],
    "grouped": _grouped,
    "Adafactor": lambda model: Adafactor(model.parameters(), eps=(1e-6, 1e-3)),
    "Shampoo": lambda model: Shampoo(model.parameters(), lr=0.5),
}

LAYOUTS = (
    Layout(dp=2, zero=3, mode="auto"),
    Layout(tp=2, mode="auto"),
    Layout(pp=2, num_microbatches=2, mode="auto"),
    Layout(dp=2, tp=2, zero=1, mode="auto"),
    Layout(dp=2, tp=2, zero=3, mode="auto"),
)

ALL = tuple((name, layout) for name in ("two", "grouped") for layout in LAYOUTS)
SOME = tuple((name, layout) for name in ("Adafactor", "Shampoo") for layout in LAYOUTS if layout.tp == 2)


class FusedGPT(TinyGPT):
    """Has fused projections, a tied head, and a vocabulary that does not divide."""

    def __init__(self, name: str) -> None:
        super().__init__(vocabulary=63, num_layers=1)
        self.blocks = nn.ModuleList([FusedQKV()])
        self.name, self.automatic_optimization = name, name != "two"

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                self.clip_gradients(optimizer, 0.5)
                optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.name](self)


def _trained(name: str, layout: Layout | None) -> tuple[dict[str, Tensor], int]:
    """The weights, and the elements of states that this rank has."""
    settings = {} if name == "two" else {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    trainer, _ = fitted(
        layout,
        partial(FusedGPT, name),
        data=partial(tokens, vocabulary=63),
        epochs=1,
        precision="64-true",
        **settings,
    )
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return whole_state(trainer), sum(value.numel() for value in states if isinstance(value, Tensor))


@cache
def _in_one_process(name: str) -> tuple[dict[str, Tensor], int]:
    return _trained(name, None)


@pytest.mark.parametrize(("name", "layout"), [*ALL, *SOME], ids=str)
def test_steps_as_one_process(workers: WorkerPools, name: str, layout: Layout) -> None:
    expected, num_states = _in_one_process(name)
    L.seed_everything(1, verbose=False)
    initial = FusedGPT(name).state_dict()
    moved = max(float((expected[fqn] - value).abs().max()) for fqn, value in initial.items())
    for weights, num_held in workers(layout.world_size).run(_trained, name, layout):
        assert_same_state([weights], expected, tolerance=1e-8 * moved)
        assert num_held < 0.9 * num_states


def _resumed(layout: Layout | None, *, begun: Path | None = None, saved: Path | None = None) -> dict[str, Tensor]:
    """The weights after an epoch from a checkpoint, or from the start to one."""
    trainer, _ = fitted(
        layout,
        partial(FusedGPT, "grouped"),
        data=partial(tokens, vocabulary=63),
        batches=2,
        epochs=2 if begun else 1,
        precision="64-true",
        ckpt_path=begun,
    )
    if saved is not None:
        trainer.save_checkpoint(saved)
    return whole_state(trainer)


def test_checkpoints_go_on_in_other_layouts(workers: WorkerPools, tmp_path: Path) -> None:
    tensor, sharded = Layout(dp=2, tp=2, zero=1), Layout(dp=2, zero=3)
    paths = {name: tmp_path / f"{name}.ckpt" for name in ("one", "tensor", "sharded")}
    _resumed(None, saved=paths["one"])
    workers(4).run(partial(_resumed, saved=paths["tensor"]), tensor)
    workers(2).run(partial(_resumed, saved=paths["sharded"]), sharded)
    expected = _resumed(None, begun=paths["one"])
    found = [
        *workers(4).run(partial(_resumed, begun=paths["one"]), tensor),
        *workers(2).run(partial(_resumed, begun=paths["tensor"]), sharded),
        _resumed(None, begun=paths["sharded"]),
    ]
    assert_same_state(found, expected, tolerance=1e-10)
