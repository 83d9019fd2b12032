"""The one law, as a harness: a `Job` trained in one process and in a `Layout` gives the same numbers.

    ranks = run_layout(workers, job, layout)   ThreeDStrategy, layout.world_size ranks
    assert_parity(job, ranks)                  against one process: losses, gradient norms, logged values, all weights

What it does not decide: which parts of the model a rank should hold. `Outcome.held` says what it did hold.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import Dataset, Subset

from lightning_3d import ThreeDStrategy
from lightning_3d.planning.plan import Plan
from tests.models import TinyGPT, loader, tokens, training_loader
from tests.workers import WorkerPools

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}
"""Settings of a Trainer that writes and prints nothing."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained: one epoch of `steps` optimizer steps, then validation."""

    model: Callable[[], L.LightningModule] = TinyGPT
    """Builds the model; the global seed is set just before. Module-level, or a `functools.partial` of it."""

    data: Callable[[int], Dataset[tuple[Tensor, ...]]] = tokens
    """Builds a dataset with the given number of samples."""

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; torch's default if None."""

    steps: int = 3
    num_missing: int = 0
    """Samples that the last training batch is short of."""

    global_batch_size: int = 8
    accumulate_grad_batches: int = 1
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: Literal["norm", "value"] = "norm"
    precision: Literal["32-true", "bf16-mixed", "64-true"] = "32-true"
    num_val_batches: int = 2
    """Global batches of validation; 0 for none."""

    seed: int = 1
    accelerator: str = "cpu"
    """Of the layout's ranks, as the Trainer takes it; the reference runs on the CPU."""
    sees_gradients: bool = True
    """Whether a callback takes the norm of the gradients before each optimizer step; without one, ZeRO leaves them
    sharded."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How it is trained: sizes of the mesh axes and the settings that go with them."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    zero: Literal[0, 1, 2, 3] = 1
    num_microbatches: int | Literal["auto"] = "auto"
    schedule: Literal["gpipe", "1f1b", "interleaved", "interleaved_zero_bubble", "zbv"] = "1f1b"
    stages_per_rank: int | Literal["auto"] = "auto"
    partition: str | tuple[str, ...] = "parameters"
    loss: Literal["auto", "mean", "sum", "whole"] = "auto"
    mode: Literal["auto", "microbatched", "inline"] = "microbatched"
    """Not what users have, as steps that fail in microbatches are right inline."""
    tensor_plan: tuple[tuple[str, str], ...] = ()
    sequence_parallel: bool = False
    verify: bool = True
    zero_settings: Mapping[str, Any] = field(default_factory=dict)
    """Of `zero`, besides the stage."""
    compile_backend: Literal["inductor", "aot_eager"] | None = None
    """What compiles the blocks; None leaves them eager."""
    save_distributed_checkpoint: bool | Literal["auto"] = "auto"
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    """How checkpoints are written."""
    activations: Mapping[str, Any] = field(default_factory=dict)
    """What of the blocks' forwards is kept."""
    context: Mapping[str, Any] = field(default_factory=dict)
    """How attention on slices of sequences goes."""
    precision: Mapping[str, Any] = field(default_factory=dict)
    """How losses are scaled and weights kept in 16 bits."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def num_state(self) -> int:
        """Ranks that hold the same weights."""
        return self.dp * self.cp

    def __str__(self) -> str:
        return (
            f"pp{self.pp}-dp{self.dp}-tp{self.tp}-zero{self.zero}-{self.schedule}-mb{self.num_microbatches}"
            + "".join(f"-{name}={value}" for name, value in self.zero_settings.items())
        )

    def strategy(self) -> ThreeDStrategy:
        return ThreeDStrategy(
            pipeline_parallel_size=self.pp,
            data_parallel_size=self.dp,
            context_parallel_size=self.cp,
            tensor_parallel_size=self.tp,
            zero={"stage": self.zero, **self.zero_settings},
            pipeline={
                "num_microbatches": self.num_microbatches,
                "partition": self.partition,
                "loss": self.loss,
                "mode": self.mode,
                "schedule": self.schedule,
                "stages_per_rank": self.stages_per_rank,
            },
            tensor={
                "plan": self.tensor_plan,
                "sequence_parallel": self.sequence_parallel,
                "verify": self.verify,
            },
            activations=dict(self.activations),
            context=dict(self.context),
            compile={"enabled": self.compile_backend is not None, "backend": self.compile_backend or "inductor"},
            checkpoint=dict(self.checkpoint),
            precision=dict(self.precision),
            save_distributed_checkpoint=self.save_distributed_checkpoint,
        )


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one rank holds between steps: number of local elements by FQN, absent where it is 0; ties appear once."""

    parameters: dict[str, int]

    optimizer_state: dict[str, int]
    """Over all tensors of the parameter's state but 0-d ones (AdamW: twice the parameter)."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one process saw of a run."""

    losses: list[float]
    """The logged `loss_step` after every batch."""
    gradient_norms: list[float]
    """The global 2-norm of all gradients before clipping, at every optimizer step."""
    metrics: dict[str, float]
    """`trainer.callback_metrics` after the run."""
    weights: dict[str, Tensor]
    """The `state_dict` of the whole model."""
    held: Held
    plan: Plan | None
    """None without a strategy of this package."""
    warned: list[str]


class NormRecorder(L.Callback):
    """Collects losses and norms of gradients while training, and at its end what this rank holds."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.gradient_norms: list[float] = []
        self.held = Held(parameters={}, optimizer_state={})

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if isinstance(trainer.strategy, ThreeDStrategy):
            norm = float(trainer.strategy.gradient_norm())
        else:
            gradients = [p.grad.double() for p in pl_module.parameters() if p.grad is not None]
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        self.gradient_norms.append(norm)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        self.losses.append(float(trainer.callback_metrics["loss_step"]))

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.held = held(pl_module, trainer.optimizers[0])


def held(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Held:
    """Count the elements that this process holds of every parameter and of its optimizer state."""
    parameters = {name: _num_local(parameter) for name, parameter in module.named_parameters()}
    state = {
        name: sum(_num_local(value) for value in optimizer.state[parameter].values() if _num_dims(value) > 0)
        for name, parameter in module.named_parameters()
        if parameter in optimizer.state
    }
    return Held(
        parameters={name: num for name, num in parameters.items() if num},
        optimizer_state={name: num for name, num in state.items() if num},
    )


def _num_dims(value: object) -> int:
    return value.dim() if isinstance(value, Tensor) else 0


def _num_local(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return 0 if local.is_meta else local.numel()


def devices(layout: Layout | None, accelerator: str = "cpu") -> dict[str, Any]:
    """Where the Trainer trains: on the CPU without a layout, else on a node or, where the pool says so, several."""
    ranks = 1 if layout is None else layout.world_size
    per_node = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    where = "cpu" if layout is None else accelerator
    return {"accelerator": where, "devices": per_node, "num_nodes": ranks // per_node}


def plan_text(plan: Plan | None) -> str:
    """What people see of a plan."""
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan)
    return console.export_text()


def fitted(
    layout: Layout | None,
    model: Callable[[], L.LightningModule],
    *,
    callbacks: Sequence[L.Callback] = (),
    data: Callable[[int], Dataset[tuple[Tensor, ...]]] = tokens,
    batches: int = 4,
    epochs: int = 2,
    ckpt_path: str | Path | None = None,
    **trainer: Any,
) -> tuple[L.Trainer, L.LightningModule]:
    """Train and validate on `batches` global batches of 8 samples, in this process or as a rank of a layout.

    Args:
        layout: None for this process with the plain Trainer.
        trainer: More settings of the Trainer.
    """
    dp = 1 if layout is None else layout.dp
    strategy = "auto" if layout is None else layout.strategy()
    settings = {"enable_checkpointing": False, **QUIET, **devices(layout), **trainer}
    L.seed_everything(1, verbose=False)
    runs = L.Trainer(strategy=strategy, max_epochs=epochs, callbacks=[*callbacks], **settings)
    module, samples = model(), data(8 * batches)
    train = training_loader(samples, global_batch_size=8, data_parallel_size=dp)
    val = loader(samples, global_batch_size=8, data_parallel_size=dp)
    runs.fit(module, train, val, ckpt_path=ckpt_path, weights_only=False)
    return runs, module


def whole_state(trainer: L.Trainer) -> dict[str, Tensor]:
    """What `state_dict` of the trained model is in one process; every rank calls it."""
    summoned = nullcontext()
    if isinstance(trainer.strategy, ThreeDStrategy):
        summoned = trainer.strategy.summon_full_params(writeback=False)
    with summoned:
        return {fqn: value.detach().clone() for fqn, value in trainer.lightning_module.state_dict().items()}


def assert_same_state(
    states: Iterable[dict[str, Tensor]], expected: dict[str, Tensor], tolerance: float = 1e-5
) -> None:
    """Compare states by name."""
    for state in states:
        assert state.keys() == expected.keys()
        for fqn, value in expected.items():
            torch.testing.assert_close(state[fqn], value, atol=tolerance, rtol=0, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


def splits(job: Job) -> tuple[Dataset[tuple[Tensor, ...]], Dataset[tuple[Tensor, ...]]]:
    """Training and validation samples."""
    num_train = job.steps * job.accumulate_grad_batches * job.global_batch_size - job.num_missing
    num_val = job.num_val_batches * job.global_batch_size
    samples = job.data(num_train + num_val)
    return Subset(samples, range(num_train)), Subset(samples, range(num_train, num_train + num_val))


def ran(job: Job, layout: Layout | None) -> Outcome:
    """Train the job as a rank of a layout, or without one in this process with the plain Trainer."""
    recorder, dp = NormRecorder(), 1 if layout is None else layout.dp
    trainer = L.Trainer(
        **QUIET | devices(layout, job.accelerator),
        strategy="auto" if layout is None else layout.strategy(),
        precision=job.precision,
        max_epochs=1,
        accumulate_grad_batches=job.accumulate_grad_batches,
        gradient_clip_val=job.gradient_clip_val,
        gradient_clip_algorithm=job.gradient_clip_algorithm,
        limit_val_batches=job.num_val_batches,
        callbacks=[recorder],
        enable_checkpointing=False,
    )
    batches: dict[str, Any] = {"global_batch_size": job.global_batch_size, "data_parallel_size": dp}
    train, val = splits(job)
    L.seed_everything(job.seed, verbose=False)  # also the seed of the sampler that Lightning adds
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(
            job.model(),
            training_loader(train, seed=job.seed, collate=job.collate, **batches),
            loader(val, collate=job.collate, **batches),
        )
    return Outcome(
        losses=recorder.losses,
        gradient_norms=recorder.gradient_norms,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        weights={fqn: value.cpu() for fqn, value in whole_state(trainer).items()},
        held=recorder.held,
        plan=trainer.strategy.plan if isinstance(trainer.strategy, ThreeDStrategy) else None,
        warned=[str(warning.message) for warning in caught],
    )


def run_layout(workers: WorkerPools, job: Job, layout: Layout) -> list[Outcome]:
    """Train the job on `layout.world_size` ranks of the pool."""
    return workers(layout.world_size).run(ran, job, layout)


def assert_parity(job: Job, ranks: Sequence[Outcome], tolerance: float = 1e-5) -> None:
    """Compare every number with those of one process; the greatest absolute difference of each kind may be `tolerance`,
    of gradient norms above 1 relative to the greatest.

    Raises:
        AssertionError: Something differs, is missing, or is not a number.
    """
    expected = ran(job, None)
    assert expected.losses, "the reference is empty"
    of_norms = tolerance * max([1.0, *expected.gradient_norms])  # not of order 1 as the rest is, and in fp32
    for rank, outcome in enumerate(ranks):
        where = f"on rank {rank}"
        assert outcome.losses == pytest.approx(expected.losses, rel=0, abs=tolerance), where
        assert outcome.gradient_norms == pytest.approx(expected.gradient_norms, rel=0, abs=of_norms), where
        assert outcome.metrics == pytest.approx(expected.metrics, rel=0, abs=tolerance), where
    assert_same_state([outcome.weights for outcome in ranks], expected.weights, tolerance)
