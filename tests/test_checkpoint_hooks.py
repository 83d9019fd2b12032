"""Checkpoints in the hands of the user's code: hooks that change them, modules as hyperparameters, a ``CheckpointIO``,
``load_from_checkpoint``. Each script runs in one process and in {dp 2, pp 2, tp 2}, with the same outcome.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn

from lightning_3d import ConfigError
from tests.models import TinyMLP, features, loader
from tests.parity import QUIET, Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

LAYOUTS = [
    Layout(dp=2, save_distributed_checkpoint=True),
    Layout(pp=2, save_distributed_checkpoint=True),
    Layout(dp=2, zero=3),
    Layout(pp=2),
    Layout(tp=2),
]
"""Two with folders, then files."""


trained = partial(fitted, data=features)


# ---------------------------------------------------------------------------------------------------------------- hooks


class Renames(TinyMLP):
    """Saves its state under other names, in half the bytes, without a frozen part, and with a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.seen: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.frozen(self.layers(x))
        return y

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen.append({name: tuple(value.shape) for name, value in state.items()})
        self.seen.append([saved["param_groups"][0]["lr"] for saved in checkpoint["optimizer_states"]])
        del state["frozen.weight"], state["frozen.bias"]
        state["extra"] = torch.arange(3.0)
        checkpoint["state_dict"] = {f"old.{name}": value.double() for name, value in state.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        self.seen.append({name: tuple(state[name].shape) for name in sorted(state)})
        self.seen.append(state.pop("old.extra").tolist())
        missing = {"frozen.weight": self.frozen.weight.detach(), "frozen.bias": self.frozen.bias.detach()}
        checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()} | missing


class Watches(L.Callback):
    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.names.append(sorted(checkpoint["state_dict"]))
        self.names.append(sorted(getattr(checkpoint["state_dict"], "_metadata", {})))  # versions of modules
        checkpoint["own"] = len(self.names)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.names.append([str(checkpoint["own"])])


def renames(layout: Layout | None) -> dict[str, Any]:
    """Saves to a URL, goes on from there, and saves what a run that only evaluates has loaded from there."""
    watches, path = [Watches() for _ in range(3)], f"file://{Path.cwd()}/x.ckpt"
    trainer, first = trained(layout, Renames, epochs=1, callbacks=[watches[0]])
    before = whole_state(trainer)
    trainer.save_checkpoint(path)
    assert Path("x.ckpt").exists()
    trainer, second = trained(layout, Renames, epochs=2, callbacks=[watches[1]], ckpt_path=path)
    after = whole_state(trainer)
    L.seed_everything(1, verbose=False)
    third = Renames()
    strategy, ranks, dp = ("auto", 1, 1) if layout is None else (layout.strategy(), layout.world_size, layout.dp)
    trainer = L.Trainer(**QUIET, strategy=strategy, devices=ranks, callbacks=[watches[2]], enable_checkpointing=False)
    data = loader(features(16), global_batch_size=8, data_parallel_size=dp)
    (metrics,) = trainer.validate(third, data, ckpt_path=path, verbose=False, weights_only=False)
    trainer.save_checkpoint("y.ckpt")
    return {
        "before": before,
        "after": after,
        "evaluated": whole_state(trainer),
        "loss": round(metrics["val_loss"], 4),
        "seen": [seen for module in (first, second, third) for seen in module.seen],  # type: ignore[union-attr]
        "names": [watch.names for watch in watches],
    }


def renames_in_layouts() -> dict[str, dict[str, Any]]:
    results = {}
    for i, layout in enumerate(LAYOUTS):
        Path(str(i)).mkdir(exist_ok=True)
        dist.barrier()
        with contextlib.chdir(str(i)):
            results[f"{layout}, folders={layout.save_distributed_checkpoint}"] = renames(layout)
    return results


def test_hooks_change_what_is_saved_and_loaded(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(renames, None)
    assert expected["seen"][3] == [0.0, 1.0, 2.0]
    assert not torch.equal(expected["before"]["layers.0.weight"], expected["after"]["layers.0.weight"])
    assert_same_state([expected["evaluated"]], expected["before"])
    for of_rank in workers(2).run(renames_in_layouts):
        for layout, found in of_rank.items():
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, dict):
                    assert_same_state([found[name]], value)
                else:
                    assert found[name] == value, f"{layout}: {name}"


class ReadsValues(TinyMLP):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.norms = checkpoint["norms"] = {name: float(v.norm()) for name, v in checkpoint["state_dict"].items()}


def reads_values(layout: Layout | None) -> dict[str, float]:
    trainer, module = trained(layout, ReadsValues, epochs=1)
    trainer.save_checkpoint("x.ckpt")
    return {name: round(norm, 4) for name, norm in module.norms.items()}


def reads_in_layouts() -> list[dict[str, float]]:
    """Files, and a folder of replicas; in a folder of stages each has values of its own."""
    with pytest.raises(Exception, match=r"lies on another pipeline stage, which saves it.*summon_full_params"):
        reads_values(LAYOUTS[1])
    return [reads_values(layout) for layout in (LAYOUTS[0], *LAYOUTS[2:])]


def test_hooks_read_the_values_of_one_process(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(reads_values, None)
    assert workers(2).run(reads_in_layouts) == [[expected] * 4] * 2


# ----------------------------------------------------------------------------------------------- hyperparameters, files


class Wraps(TinyMLP):
    """As lightning-hydra-template does: the network is a hyperparameter."""

    def __init__(self, net: nn.Module, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.layers = net  # type: ignore[assignment]


def wraps() -> Wraps:
    return Wraps(nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 4)), lr=0.05)


def wrapped(path: Path) -> dict[str, Tensor]:
    trainer, _ = trained(LAYOUTS[1], wraps, epochs=1)
    trainer.save_checkpoint(path)
    return whole_state(trainer)


@pytest.mark.filterwarnings("ignore:Attribute 'net' is an instance")
def test_modules_are_hyperparameters(workers: WorkerPools, tmp_path: Path) -> None:
    states = workers(2).run(wrapped, tmp_path / "x.ckpt")
    module = Wraps.load_from_checkpoint(tmp_path / "x.ckpt", weights_only=False, map_location="cpu")
    assert module.hparams["lr"] == 0.05
    assert_same_state(states, module.state_dict())


# --------------------------------------------------------------------------------------------------------- CheckpointIO


class NotesCalls(TorchCheckpointIO):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        self.calls.append(f"save {Path(path).name} {storage_options}")
        super().save_checkpoint({**checkpoint, "by": "me"}, path)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.calls.append(f"load {Path(path).name}")
        return super().load_checkpoint(path, *args, **kwargs)

    def remove_checkpoint(self, path: Any) -> None:
        self.calls.append(f"remove {Path(path).name}")
        super().remove_checkpoint(path)


def saved_by(layout: Layout) -> tuple[list[str], list[str], str, dict[str, Tensor]]:
    first, second = NotesCalls(), NotesCalls()
    keeps = ModelCheckpoint(".", save_top_k=1, monitor="val_loss")
    settings = {"enable_checkpointing": True, "save": "auto"}
    trainer, _ = _fitted(layout, TinyMLP, epochs=2, plugins=[first], callbacks=[keeps], **settings)
    trainer.save_checkpoint("x.ckpt", storage_options={"tier": "cold"})
    by = torch.load("x.ckpt", weights_only=False)["by"]
    resumed, _ = _fitted(layout, TinyMLP, epochs=3, plugins=[second], ckpt_path="x.ckpt", save="auto")
    _fitted(layout, TinyMLP, epochs=1, plugins=[AsyncCheckpointIO()], callbacks=[ModelCheckpoint("later")], **settings)
    dist.barrier()  # rank 0 has written when its fit returns
    assert len(list(Path("later").iterdir())) == 1
    with pytest.raises(ConfigError, match=re.escape("not through NotesCalls: set it to False")):
        _fitted(layout, TinyMLP, epochs=1, plugins=[NotesCalls()], save=True)
    return first.calls, second.calls, by, whole_state(resumed)


def _fitted(layout: Layout, model: Callable[[], L.LightningModule], *, save: Any, **kwargs: Any) -> Any:
    return trained(Layout(**{**vars(layout), "save_distributed_checkpoint": save}), model, **kwargs)


def test_a_checkpoint_io_is_used(workers: WorkerPools) -> None:
    rank0, rank1 = workers(2).run(saved_by, Layout(pp=2))
    assert rank0[0] == [
        "save epoch=0-step=4.ckpt None",
        "save epoch=1-step=8.ckpt None",
        "remove epoch=0-step=4.ckpt",
        "save x.ckpt {'tier': 'cold'}",
    ]
    assert rank1[0] == []  # as under DDP
    assert rank0[1:3] == rank1[1:3] == (["load x.ckpt"], "me")
    (plain,) = workers(1).run(_state_after, 3)
    assert_same_state([rank0[3], rank1[3]], plain)


def _state_after(epochs: int) -> dict[str, Tensor]:
    return whole_state(trained(None, TinyMLP, epochs=epochs)[0])
