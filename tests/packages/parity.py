"""The one law for modules that others wrote: a `PackageJob` trained in one process and in a layout gives the same.

tests/parity.py trains modules of ours, which log what it compares. These log what they like, so the loss is that which
callbacks get, and everything logged is compared as it is. Under data parallel a module that logs without `sync_dist`
logs its replica's value, as under DDP: there the replicas' mean is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from tests.architectures import Samples
from tests.models import loader, reference_loader, training_loader
from tests.parity import QUIET, Held, Layout, NormRecorder, assert_same_state
from tests.workers import WorkerPools

STEPS = 3
GLOBAL_BATCH_SIZE = 8
SEED = 1

ADAM_EPSILON = 1e-3
"""Of Adam and its kin, in every run: with 1e-8 a gradient that is zero but for rounding moves a weight as far."""


@dataclass(frozen=True, kw_only=True)
class PackageJob:
    """One module of a package, trained for `STEPS` steps and validated on one batch."""

    module: Callable[[], L.LightningModule]
    """Builds it; the global seed is set just before."""

    data: Callable[[int], Dataset[Any]]
    """Builds a dataset with the given number of samples."""

    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples; torch's default if None."""

    validates: bool = True
    trainer: Mapping[str, Any] | None = None
    """More settings of the Trainer."""
    of_replicas: frozenset[str] = frozenset()
    """Logged values whose mean over replicas is not that of one process, also under DDP (roots, ratios)."""
    prepare: Callable[[L.LightningModule, int, int], None] | None = None
    """Called with the module, the number of ranks and that of replicas before it is trained, as by a user's script."""
    environment: Callable[[], AbstractContextManager[object]] = nullcontext
    """What surrounds a run."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank saw of a run."""

    losses: list[float]
    gradient_norms: list[float]
    metrics: dict[str, float]
    weights: dict[str, Tensor]
    """The tensors in the `state_dict` of the checkpoint, on rank 0."""
    held: Held
    num_parameters: int


class _Losses(NormRecorder):
    """Takes losses from what steps return, and makes Adam heed the size of gradients."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for group in trainer.optimizers[0].param_groups:
            if "eps" in group:
                group["eps"] = ADAM_EPSILON

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: object, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


def train(job: PackageJob, layout: Layout | None) -> Outcome:
    """Train in this process, or as a rank of a layout."""
    with job.environment():
        return _train(job, layout)


def _train(job: PackageJob, layout: Layout | None) -> Outcome:
    recorder = _Losses()
    ranks, replicas = (1, 1) if layout is None else (layout.world_size, layout.dp)
    settings: dict[str, Any] = {"max_epochs": 1, **QUIET, **(job.trainer or {})}
    trainer = L.Trainer(
        strategy="auto" if layout is None else layout.strategy(),
        devices=ranks,
        callbacks=[recorder],
        enable_checkpointing=False,
        **settings,
    )
    num_train = STEPS * GLOBAL_BATCH_SIZE
    samples = job.data(num_train + GLOBAL_BATCH_SIZE)
    train_part = Subset(samples, range(num_train))
    val_part = Subset(samples, range(num_train, num_train + GLOBAL_BATCH_SIZE))
    L.seed_everything(SEED, verbose=False)
    module = job.module()
    if job.prepare is not None:
        job.prepare(module, ranks, replicas)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    sizes = {"global_batch_size": GLOBAL_BATCH_SIZE, "collate": job.collate}
    batches = (
        reference_loader(train_part, seed=SEED, **sizes)
        if layout is None
        else training_loader(train_part, data_parallel_size=replicas, seed=SEED, **sizes)
    )
    trainer.fit(module, batches, loader(val_part, data_parallel_size=replicas, **sizes) if job.validates else None)
    path = Path("final.ckpt")
    trainer.save_checkpoint(path)
    weights = {}
    if trainer.global_rank == 0:
        state = torch.load(path, map_location="cpu", weights_only=False)["state_dict"]
        weights = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    return Outcome(
        losses=recorder.losses,
        gradient_norms=recorder.gradient_norms,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        weights=weights,
        held=recorder.held,
        num_parameters=num_parameters,
    )


def assert_same_as_one_process(
    workers: WorkerPools,
    job: PackageJob,
    reference: Outcome,
    layout: Layout,
    *,
    is_whole: bool,
    tolerance: float = 1e-5,
) -> None:
    """Train in the layout and compare everything with the reference.

    Args:
        is_whole: Whether a rank of a pipeline or a tensor-parallel group is to hold (nearly) the whole model.

    Raises:
        AssertionError: Something differs by more than `tolerance` (relative where it is above 1), or the ranks hold
            other shares of the model.
    """
    ranks = workers(layout.world_size).run(train, job, layout, timeout=200)
    assert len(reference.losses) >= STEPS
    assert all(rank.metrics.keys() == reference.metrics.keys() for rank in ranks)
    assert all(len(rank.losses) == len(reference.losses) for rank in ranks)
    seen = {f"loss {step}": [rank.losses[step] for rank in ranks] for step in range(len(reference.losses))}
    expected = {f"loss {step}": loss for step, loss in enumerate(reference.losses)}
    seen |= {name: [rank.metrics[name] for rank in ranks] for name in reference.metrics}
    expected |= reference.metrics
    if layout.dp > 1:
        seen = {name: values for name, values in seen.items() if name not in job.of_replicas}
    for name, values in seen.items():
        compared = [sum(values) / len(values)] if layout.dp > 1 else values
        for value in compared:
            assert value == _near(expected[name], tolerance), f"{name}: {values}, expected {expected[name]}"
    bound = tolerance * max([1.0, *reference.gradient_norms])  # as in tests/parity.py
    for rank in ranks:
        assert rank.gradient_norms == pytest.approx(reference.gradient_norms, rel=0, abs=bound)
    assert_same_state([ranks[0].weights], reference.weights)
    if layout.dp == 1:
        shares = [sum(rank.held.parameters.values()) / rank.num_parameters for rank in ranks]
        assert (max(shares) > 0.95) is is_whole, f"the ranks hold {shares} of the parameters"


def _near(value: float, tolerance: float) -> Any:
    return pytest.approx(value, rel=tolerance, abs=tolerance, nan_ok=True)


def dict_samples(samples: list[Any]) -> Dataset[Any]:
    """A dataset of what is in the list."""
    return Samples(samples)
