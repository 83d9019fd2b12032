"""Plain ZeRO where a backward fails, where an owner's step fails, and when a pipeline reduces its gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_3d.distributed.mesh import MeshShape, build_mesh
from lightning_3d.zero.plain_parameters import PlainParameters
from tests.models import TinyMLP, features
from tests.optimizers import FlatStep, Lamb
from tests.parity import Layout, fitted
from tests.workers import WorkerError, WorkerPools


class SkipsErrors(TinyMLP):
    """Goes on after a backward that fails."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            if self.global_step == 1:
                self.layers[0].weight.register_hook(_fail)  # type: ignore[union-attr]
            super().backward(loss, *args, **kwargs)
        except ValueError:
            pass


def _fail(gradient: Tensor) -> Tensor:
    raise ValueError("out of memory")


def _skip_errors() -> None:
    fitted(Layout(dp=2), SkipsErrors, data=features)


def test_gradients_lost_in_a_failed_backward_are_told(workers: WorkerPools) -> None:
    with pytest.raises(WorkerError, match="StepError: The last backward ended by an exception"):
        workers(2).run(_skip_errors)


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


def _launched_before_the_end(layout: Layout) -> list[bool]:
    launched: list[bool] = []
    end_step = PlainParameters.end_step

    def look(zero: PlainParameters) -> None:
        launched.extend(reducer.is_launched for reducer in zero._reducers.values())
        end_step(zero)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlainParameters, "end_step", look)
        fitted(layout, TinyMLP, data=features, batches=2, epochs=1)
    return launched


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_pipeline_reduces_in_the_last_backward_of_a_stage(workers: WorkerPools, schedule: Any) -> None:
    layout = Layout(pp=2, dp=2, zero=1, schedule=schedule, num_microbatches=2)
    for launched in workers(4).run(_launched_before_the_end, layout):
        assert len(launched) >= 2
        assert all(launched)


def _groups() -> tuple[list[int], list[int]]:
    mesh = build_mesh(MeshShape(pp=1, dp=4, cp=1, tp=1), zero_stage=3, device_type="cpu", shard_size=2)
    ranks = dist.get_process_group_ranks
    return ranks(mesh.device_mesh["dp_shard"].get_group()), ranks(mesh.group("dp"))


def test_ranks_that_share_a_state_are_consecutive(workers: WorkerPools) -> None:
    everyone = [0, 1, 2, 3]
    groups = [([0, 1], everyone), ([0, 1], everyone), ([2, 3], everyone), ([2, 3], everyone)]
    assert workers(4).run(_groups) == groups


class OneRankReplaces(TinyMLP):
    """The first replica's buffer gets another shape than the others expect, which keep theirs."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.full((2,), 7.0))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.global_rank == 0:
            self.table = torch.zeros(5)
        return super().training_step(batch, batch_idx)


def _replaced() -> list[float]:
    _, module = fitted(Layout(dp=2), OneRankReplaces, data=features, batches=2, epochs=1)
    found: list[float] = dict(module.named_buffers())["table"].tolist()
    return found


def test_a_buffer_of_another_shape_is_left_alone(workers: WorkerPools) -> None:
    assert workers(2).run(_replaced) == [[0.0] * 5, [7.0, 7.0]]
