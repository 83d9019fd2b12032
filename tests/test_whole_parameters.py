"""Optimizers that need whole parameters, each of which one data-parallel rank owns: states, checkpoints, misuse."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BackboneFinetuning
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Adafactor, AdamW, Muon, Optimizer

from lightning_3d import ThreeDStrategy
from lightning_3d.zero.owners import choose_owners
from tests.models import TinyMLP, features, loader, reference_loader, training_loader
from tests.optimizers import ByHand, Lamb, Lars, Lion, Shampoo
from tests.parity import QUIET, Job, Layout, assert_parity, run_layout, run_reference
from tests.tables import some_in_matrix
from tests.workers import WorkerPools

# ---- owners


def _sizes(owners: dict[nn.Parameter, int], num_ranks: int) -> list[int]:
    return [sum(parameter.numel() for parameter, owner in owners.items() if owner == rank) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_owners_are_balanced(num_ranks: int) -> None:
    model = TinyMLP(width=48, num_layers=16)
    sizes = _sizes(choose_owners(model.parameters(), num_ranks, {}), num_ranks)
    assert max(sizes) <= 1.1 * sum(sizes) / num_ranks


def test_owners_of_one_huge_parameter_and_of_few() -> None:
    huge, *small = [nn.Parameter(torch.empty(size)) for size in (10_000, 30, 20, 20, 10)]
    owners = choose_owners([*small, huge], 3, {})
    assert sorted(_sizes(owners, 3)) == [40, 40, 10_000]
    assert sorted(_sizes(choose_owners([huge], 3, {}), 3)) == [0, 0, 10_000]


def test_owners_of_parameters_that_stages_share() -> None:
    first, second, both = [nn.Parameter(torch.empty(size)) for size in (100, 100, 60)]
    small = [nn.Parameter(torch.empty(20)) for _ in range(4)]
    stages = {first: (0,), second: (1,), both: (0, 1), **dict.fromkeys(small, (1,))}
    owners = choose_owners([first, second, both, *small], 2, stages)
    for stage in (0, 1):
        held = {parameter: owner for parameter, owner in owners.items() if stage in stages[parameter]}
        assert max(_sizes(held, 2)) <= 120


# ---- states


class Trained(TinyMLP):
    """Parameters that do not divide, one of them frozen, and some of no dims or of no use."""

    make: Callable[[Any], Optimizer] = Lars

    def __init__(self, width: int = 7, num_layers: int = 2) -> None:
        super().__init__(width=width, num_layers=num_layers)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.frozen[0]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def trained_by(make: Callable[[Any], Optimizer], width: int = 7, num_layers: int = 2) -> Trained:
    model = Trained(width, num_layers)
    model.make = make
    return model


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=1), Layout(dp=3, zero=2), Layout(pp=2, dp=2, zero=1)], ids=str)
def test_each_state_is_on_one_rank(workers: WorkerPools, layout: Layout) -> None:
    job = Job(model=partial(trained_by, Lars, 32, 8), data=features, global_batch_size=12, gradient_clip_val=0.2)
    reference = run_reference(job)
    result = run_layout(workers, job, layout)
    assert_parity(reference, result, tolerance=1e-5)
    assert not [warning for warning in result.warnings if "whole parameters" in warning]
    trained = {
        name: n for name, n in reference.parameters.items() if not name.startswith(("scale", "frozen", "unused"))
    }
    states = [held.optimizer_state for held in result.held]
    for name, size in trained.items():
        assert [state[name] for state in states if name in state] == [size]
    whole = sum(trained.values())
    assert max(sum(state.values()) for state in states) <= 1.2 * whole / (layout.dp * layout.pp)


def test_owners_with_hybrid_sharding(workers: WorkerPools) -> None:
    job = Job(model=partial(trained_by, Lars, 32, 8), data=features, gradient_clip_val=0.2)
    result = run_layout(workers, job, Layout(dp=4, zero=2, zero_settings={"shard_size": 2}))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    first, second, *others = [held.optimizer_state for held in result.held]
    assert others == [first, second]
    assert sum(first.values()) <= 1.1 * sum(second.values())


def test_the_plan_says_who_steps_what(workers: WorkerPools) -> None:
    job = Job(model=partial(trained_by, Lars, 32), data=features, sees_gradients=False, num_val_batches=1)
    plan = run_layout(workers, job, Layout(dp=2, zero=1)).plan
    (lars,) = plan.optimizers
    assert (lars.name, lars.kind, lars.found) == ("Lars", "parameters", "tried on small tensors")
    assert lars.shares == "whole parameters, 10 over 2 ranks, largest share 50%"
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(plan)
    assert "tried on small tensors" in console.export_text()
    settings = {"optimizer_steps": "parameters"}
    (lion,) = run_layout(workers, _job(Lion), Layout(dp=2, zero=2, zero_settings=settings)).plan.optimizers
    assert (lion.found, lion.shares[:16]) == ("set by zero.optimizer_steps", "whole parameters")
    (lion,) = run_layout(workers, _job(Lion), Layout(dp=2, zero=2)).plan.optimizers
    assert lion.shares == "rows of each parameter over 2 ranks"


def _job(make: Callable[[Any], Optimizer], **settings: Any) -> Job:
    return Job(model=partial(trained_by, make), data=features, sees_gradients=False, num_val_batches=1, **settings)


@pytest.mark.parametrize("stage", [1, 2])
def test_elementwise_optimizers_may_step_whole_parameters(workers: WorkerPools, stage: Literal[1, 2]) -> None:
    job = _job(partial(AdamW, lr=0.01, eps=1e-3), global_batch_size=12, accumulate_grad_batches=2)
    layout = Layout(dp=3, zero=stage, zero_settings={"optimizer_steps": "parameters"})
    assert_parity(run_reference(job), run_layout(workers, job, layout), tolerance=1e-5)


# ---- checkpoints


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """Where one epoch is trained; None: by one process and Lightning's own strategy."""

    layout: Layout | None = None
    is_folder: bool = False


def _train_epoch(make: Callable[[Any], Optimizer], epochs: Sequence[Epoch], directory: Path) -> dict[str, Tensor]:
    """Train the last epoch, from the checkpoint of the one before."""
    number, epoch = len(epochs), epochs[-1]
    layout = epoch.layout or Layout()
    strategy: Any = "auto"
    if epoch.layout is not None:
        strategy = layout.strategy()
        strategy = ThreeDStrategy.from_config({**vars_of(strategy), "save_distributed_checkpoint": epoch.is_folder})
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(
        devices=layout.world_size,
        strategy=strategy,
        max_epochs=number,
        enable_checkpointing=False,
        **QUIET,
    )
    data, model = features(24), trained_by(make)
    train = training_loader(data, global_batch_size=12, data_parallel_size=layout.dp)
    val = loader(data, global_batch_size=12, data_parallel_size=layout.dp)
    trainer.fit(model, train, val, ckpt_path=str(directory / str(number - 1)) if number > 1 else None)
    trainer.save_checkpoint(directory / str(number))
    return {fqn: value.detach().clone() for fqn, value in model.state_dict().items() if not value.is_meta}


def vars_of(strategy: ThreeDStrategy) -> dict[str, Any]:
    config = strategy.config
    names = ("pipeline_parallel_size", "data_parallel_size", "tensor_parallel_size", "zero", "pipeline", "tensor")
    return {name: getattr(config, name) for name in names}


PATHS = {
    "folders": [
        Epoch(layout=Layout(dp=3, zero=2), is_folder=True),
        Epoch(layout=Layout(pp=2, dp=2, zero=1), is_folder=True),
        Epoch(layout=Layout(dp=2, zero=0), is_folder=True),
        Epoch(layout=Layout(dp=2, zero=1), is_folder=True),
    ],
    "files": [
        Epoch(layout=Layout(pp=2, dp=2, zero=2)),
        Epoch(),
        Epoch(layout=Layout(dp=3, zero=1)),
        Epoch(layout=Layout(dp=2, zero=2)),
    ],
}
SAVED: dict[str, Callable[[Any], Optimizer]] = {
    "Lars": Lars,
    "Adafactor": partial(Adafactor, lr=0.01),
    "Shampoo": Shampoo,
}


@pytest.mark.parametrize(
    ("path", "name"),
    some_in_matrix(
        itertools.product(("folders", "files"), SAVED), lambda path, name: path == "files" or name == "Lars"
    ),
)
def test_states_go_on_in_any_layout(workers: WorkerPools, tmp_path: Path, name: str, path: str) -> None:
    expected, found = {}, [{}]
    (tmp_path / "one").mkdir()
    for number in range(1, 5):
        expected = _train_epoch(SAVED[name], [Epoch()] * number, tmp_path / "one")
        epochs = PATHS[path][:number]
        layout = epochs[-1].layout
        ranks = 1 if layout is None else layout.world_size
        found = workers(ranks).run(_train_epoch, SAVED[name], epochs, tmp_path)
    for trained in found:
        for fqn, value in expected.items():
            torch.testing.assert_close(trained[fqn], value, atol=1e-5, rtol=0)


# ---- several optimizers, and parameters that come later


class Mixed(TinyMLP):
    """Muon for matrices, AdamW for the others, and gradients that its code clips."""

    def __init__(self) -> None:
        super().__init__(width=12)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.manual_backward(loss)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        self.log("loss", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return [Muon(matrices, lr=0.01), AdamW(others, lr=0.01, eps=1e-3)]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_optimizers_of_two_kinds(workers: WorkerPools, stage: Literal[0, 1, 2]) -> None:
    job = Job(model=Mixed, data=features, sees_gradients=False, num_val_batches=1)
    result = run_layout(workers, job, Layout(dp=2, zero=stage))
    assert_parity(run_reference(job), result, tolerance=1e-5)
    assert [plan.kind for plan in result.plan.optimizers] == ["parameters", "rows"]


class Grouped(TinyMLP):
    """An optimizer whose groups are of two kinds."""

    def configure_optimizers(self) -> Any:
        scaled = [parameter for parameter in self.parameters() if parameter.dim() == 2]
        others = [parameter for parameter in self.parameters() if parameter.dim() != 2]
        return TwoKinds([{"params": scaled, "scales": True}, {"params": others}])


class TwoKinds(Lamb):
    """Lamb in some groups, gradient descent in the others; counts steps in the groups that have parameters."""

    def begin(self, group: dict[str, Any]) -> None:
        if group["params"]:
            group["steps"] = group.get("steps", 0) + 1

    def update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        if group.get("scales"):
            super().update(parameter, gradient, {"lr": group["lr"] / group["steps"]})
        else:
            ByHand.update(self, parameter, gradient, group)


@pytest.mark.parametrize("stage", [1, 2])
def test_groups_of_two_kinds_that_may_not_be_empty(workers: WorkerPools, stage: Literal[1, 2]) -> None:
    job = Job(model=Grouped, data=features, sees_gradients=False, num_val_batches=1)
    assert_parity(run_reference(job), run_layout(workers, job, Layout(dp=2, zero=stage)), tolerance=1e-5)


class Finetuned(TinyMLP):
    """A backbone that is frozen at first, whose parameters join the optimizer later."""

    def __init__(self) -> None:
        super().__init__(width=12)
        *backbone, head = self.layers
        self.backbone, self.layers = nn.Sequential(*backbone), head

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.backbone(x))  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return Lars([parameter for parameter in self.parameters() if parameter.requires_grad])


def _finetune(stage: Literal[1, 2] | None) -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    ranks = 1 if stage is None else 2
    trainer = L.Trainer(
        strategy="auto" if stage is None else ThreeDStrategy(zero={"stage": stage}),
        devices=ranks,
        max_epochs=3,
        callbacks=[BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.02, lambda_func=lambda _: 1)],
        enable_checkpointing=False,
        **QUIET,
    )
    model, data = Finetuned(), features(32)
    train = reference_loader(data, global_batch_size=8, seed=1)
    if ranks > 1:
        train = loader(data, global_batch_size=8, data_parallel_size=ranks)
    trainer.fit(model, train, loader(data, global_batch_size=8, data_parallel_size=ranks))
    assert len(trainer.optimizers[0].param_groups) == 2
    assert any((model.backbone[0].weight != Finetuned().backbone[0].weight).flatten())
    return {fqn: value.detach().clone() for fqn, value in model.state_dict().items()}


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_join_later(workers: WorkerPools, stage: Literal[1, 2]) -> None:
    expected = _finetune(None)
    for trained in workers(2).run(_finetune, stage):
        for fqn, value in expected.items():
            torch.testing.assert_close(trained[fqn], value, atol=1e-5, rtol=0)


# ---- failures


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
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(devices=2, strategy=ThreeDStrategy(), max_epochs=1, enable_checkpointing=False, **QUIET)
    model, data = Skipping(), loader(features(40), global_batch_size=8, data_parallel_size=2)
    trainer.fit(model, data, data)
    return model.num_skipped, [parameter.detach() for parameter in model.parameters()]


def test_a_step_that_fails_on_the_owner_fails_everywhere(workers: WorkerPools) -> None:
    (first, values), (second, others) = workers(2).run(_skip)
    assert first == second == 1
    for value, other in zip(values, others, strict=True):
        assert torch.equal(value, other)
