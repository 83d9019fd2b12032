"""When a checkpoint is restored: hooks come in the order of one process, and each finds what it finds there."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from tests.models import ADAM_EPS, TinyMLP, features
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

trained = partial(fitted, data=features)

LAYOUTS = [Layout(dp=2, zero=3, save_distributed_checkpoint=True), Layout(pp=2), Layout(tp=2)]


class Resumes(TinyMLP):
    """Decides by what it finds in its checkpoint; its optimizer starts from the weights that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.calls, self.start = 0.05, list[str](), 0.0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["rate"] = self.rate / 2

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")
        self.rate = checkpoint["rate"]
        self.width = tuple(checkpoint["state_dict"]["layers.0.weight"].shape)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.calls.append(f"configure_optimizers with {self.rate}")
        return torch.optim.Adam(self.parameters(), lr=self.rate, eps=ADAM_EPS)

    def on_fit_start(self) -> None:
        self.calls.append(f"on_fit_start at lr {self.optimizers().param_groups[0]['lr']}")

    def on_train_start(self) -> None:
        self.calls.append(f"on_train_start at lr {self.optimizers().param_groups[0]['lr']}, step {self.global_step}")


class Tells(L.Callback):
    """A callback with a state."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"kept": 3}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(f"load_state_dict of {state_dict}")

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self.calls.append("on_load_checkpoint")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.calls.append("on_fit_start")


def _resumed(layout: Layout | None, module: type[Resumes] = Resumes) -> tuple[Any, dict[str, Tensor]]:
    first, _ = trained(layout, module, epochs=1, callbacks=[Tells()])
    first.save_checkpoint("first.ckpt")
    callback = Tells()
    trainer, again = trained(layout, module, epochs=2, callbacks=[callback], ckpt_path="first.ckpt")
    assert isinstance(again, Resumes)
    return (again.calls, callback.calls, again.width), whole_state(trainer)


class StartsAnew(Resumes):
    """Lets its optimizer begin with nothing."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        checkpoint["optimizer_states"] = []


class Edits(Resumes):
    """Changes the learning rate and the moments that its optimizer resumes with."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        (saved,) = checkpoint["optimizer_states"]
        saved["param_groups"][0]["lr"] = 0.03
        first = next(iter(saved["state"]))
        values = saved["state"][first]
        saved["state"][first] = {**values, "exp_avg": values["exp_avg"] * 3}


class Grows(Resumes):
    """Takes the shape that its checkpoint has, as an extended vocabulary does."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(1))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["state_dict"]["extra"] = torch.arange(3.0)
        checkpoint["optimizer_states"] = []

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.extra = nn.Parameter(torch.zeros(checkpoint["state_dict"]["extra"].shape))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + self.extra.square().mean()


def _in_layouts(module: type[Resumes]) -> list[tuple[Any, dict[str, Tensor]]]:
    return [_resumed(layout, module) for layout in LAYOUTS]


@pytest.mark.parametrize("module", [Resumes, StartsAnew, Edits, Grows])
def test_hooks_come_in_the_order_of_one_process_and_change_what_is_restored(
    workers: WorkerPools, module: type[Resumes]
) -> None:
    expected, state = workers(1).run(_resumed, None, module)[0]
    assert expected[0][:2] == ["on_load_checkpoint", "configure_optimizers with 0.025"]
    for found, found_state in [outcome for of_rank in workers(2).run(_in_layouts, module) for outcome in of_rank]:
        calls = [call for call in found[0] if not call.startswith("configure_optimizers")]
        assert calls == [call for call in expected[0] if not call.startswith("configure_optimizers")]
        rates = {call for call in found[0] if call.startswith("configure_optimizers")}
        assert rates == {"configure_optimizers with 0.025"}  # planning may ask for them, too
        assert found[1:] == expected[1:]
        assert_same_state([found_state], state)
