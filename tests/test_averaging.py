"""Averages of weights in checkpoints of every layout, Lightning's and those made by hand, and their misuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.models import ADAM_EPS, TinyGPT, TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerError, WorkerPools


class FusedAttention(nn.Module):
    """Causal self-attention with one projection, whose weight tensor parallel keeps in another order."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.num_heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q * self.scale, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Model(TinyGPT):
    """Tied and fused weights, a buffer in every block and a schedule."""

    def __init__(self) -> None:
        super().__init__(width=16, num_heads=2, num_layers=2)
        for block in self.blocks:
            assert isinstance(block, nn.Module)
            block.attention = FusedAttention(16, 2)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=ADAM_EPS)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)}


class ByHand(L.Callback):
    """An average that a user writes, made before the model is made parallel; at the end it takes the model's place."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self.average: Any = AveragedModel(pl_module, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(pl_module)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for average, parameter in zip(self.average.parameters(), pl_module.parameters(), strict=True):
            parameter.copy_(average)


class Kept(ByHand):
    """Keeps its average in the checkpoint, and a copy that it averages, too, in its state: some of it without names."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self.copied = copy.deepcopy(pl_module)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        for average, parameter in zip(self.copied.parameters(), pl_module.parameters(), strict=True):
            average.lerp_(parameter, 0.3)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        for average, parameter in zip(self.copied.parameters(), pl_module.parameters(), strict=True):
            parameter.lerp_(average, 0.5)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["ema"] = {"deep": [self.average.state_dict()]}

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        self.average.load_state_dict(checkpoint["ema"]["deep"][0])

    def state_dict(self) -> dict[str, Any]:
        state = self.copied.state_dict()
        return {"ema": {name: state.pop(name) for name in [*state][:3]}, "without names": [*state.values()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = self.copied.state_dict()
        names = [name for name in state if name not in state_dict["ema"]]
        self.copied.load_state_dict(state_dict["ema"] | dict(zip(names, state_dict["without names"], strict=True)))


# ---- checkpoints

SAVED: dict[str, Callable[[], L.Callback]] = {
    "EMAWeightAveraging": partial(EMAWeightAveraging, decay=0.5),
    "SWA": partial(StochasticWeightAveraging, swa_lrs=1e-2, swa_epoch_start=1),
    "by hand": Kept,
}


class _Save(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def _resume(first: Layout | None, second: Layout | None, name: str) -> dict[str, Tensor]:
    path = Path("averaged.ckpt")
    fitted(first, Model, callbacks=[SAVED[name](), _Save(path)], batches=2, epochs=2)
    trainer, _ = fitted(second, Model, callbacks=[SAVED[name]()], batches=2, epochs=3, ckpt_path=path)
    return whole_state(trainer)


def _resume_all(first: Layout | None, second: Layout | None) -> dict[str, dict[str, Tensor]]:
    return {name: _resume(first, second, name) for name in SAVED}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """By one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("resumed"))
        return _resume_all(None, None)


@pytest.mark.parametrize(
    ("first", "second", "folder"),
    [
        (Layout(dp=2, zero=1), Layout(dp=2, zero=3), True),
        (Layout(pp=2), Layout(tp=2), False),
    ],
    ids=str,
)
def test_averages_are_resumed_in_any_layout(
    workers: WorkerPools, resumed: dict[str, dict[str, Tensor]], first: Layout, second: Layout, folder: bool
) -> None:
    layouts = [replace(layout, save_distributed_checkpoint=folder) for layout in (first, second)]
    for rank in workers(2).run(_resume_all, *layouts):
        for name, expected in resumed.items():
            assert_same_state([rank[name]], expected)


# ---- full averages


class _Hidden(L.Callback):
    """Averages with a copy that was made before the model was made parallel, and that no one finds."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        average = AveragedModel(pl_module)
        self.average = lambda: average

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average().update_parameters(pl_module)

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for average, parameter in zip(self.average().parameters(), pl_module.parameters(), strict=True):
            assert type(average) is torch.nn.Parameter
            parameter.copy_(average)


def _hide(layout: Layout | None) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, TinyMLP, data=features, callbacks=[_Hidden()])
    return whole_state(trainer)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), Layout(tp=2)], ids=str)
def test_full_averages_gather_what_they_average(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(2).run(_hide, layout), _hide(None))


# ---- misuse


class _Assigns(L.Callback):
    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.load_state_dict(TinyMLP().state_dict(), assign=True)


def _misuse(kind: str) -> None:
    kinds: dict[str, Callable[[], list[L.Callback]]] = {
        "one rank": lambda: [Kept()] if torch.distributed.get_rank() == 0 else [],
        "assign": lambda: [_Assigns()],
    }
    fitted(Layout(dp=2, zero=3), TinyMLP, data=features, callbacks=kinds[kind]())


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one rank", r"different numbers of copies of TinyMLP \(by rank: \[2, 0\]\)"),
        ("assign", r"load_state_dict\(assign=True\) would put another tensor in place of layers.0.weight"),
    ],
)
def test_misuse_is_refused_on_all_ranks(workers: WorkerPools, kind: str, message: str) -> None:
    with pytest.raises(WorkerError, match=f"(Step|Checkpoint)Error: .*{message}") as caught:
        workers(2).run(_misuse, kind)
    assert caught.value.failures.keys() == {0, 1}
