"""Plain ZeRO where an owner's step fails, and states of one element."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.models import TinyMLP, features
from tests.optimizers import FlatStep, Lamb
from tests.parity import Layout, fitted
from tests.workers import WorkerPools


class Failing(Lamb):
    """Fails on one parameter, in the third step."""

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        step = self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        if step == 3 and parameter.shape == (7, 8):
            raise torch.linalg.LinAlgError("did not converge")
        super().update(parameter, gradient, group)


class Skipping(TinyMLP):
    """Goes on after a step that fails."""

    def __init__(self) -> None:
        super().__init__(width=7)
        self.num_skipped = 0

    def configure_optimizers(self) -> Any:
        return Failing(self.parameters())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().optimizer_step(*args, **kwargs)
        except torch.linalg.LinAlgError as error:
            self.num_skipped += "did not converge" in str(error)


def _skip() -> tuple[int, list[Tensor]]:
    _, model = fitted(Layout(dp=2), Skipping, data=features)
    assert isinstance(model, Skipping)
    return model.num_skipped, [parameter.detach() for parameter in model.parameters()]


def test_a_step_that_fails_on_the_owner_fails_everywhere(workers: WorkerPools) -> None:
    (first, values), (second, others) = workers(2).run(_skip)
    assert first == second == 1
    for value, other in zip(values, others, strict=True):
        assert torch.equal(value, other)


class Flat(TinyMLP):
    """Its optimizer counts in a state of one element."""

    def configure_optimizers(self) -> Any:
        return FlatStep(self.parameters())


def _save_and_resume(first: Layout, second: Layout) -> None:
    path = Path("flat.ckpt")
    for epochs, layout in enumerate((first, second), 1):
        one_file = replace(layout, save_distributed_checkpoint=False)
        trainer, _ = fitted(one_file, Flat, data=features, epochs=epochs, ckpt_path=path if epochs > 1 else None)
        trainer.save_checkpoint(path)
    if trainer.is_global_zero:
        saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
        assert all(values["step"].tolist() == [8.0] for values in saved.values())
        assert {tuple(values["average"].shape) for values in saved.values()} >= {(4,), (4, 32), (32, 8)}


def test_states_of_one_element_are_saved(workers: WorkerPools) -> None:
    workers(2).run(_save_and_resume, Layout(dp=2, zero=0), Layout(dp=2, zero=2))
