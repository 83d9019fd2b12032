"""A case in this process, or as one rank of its layout: everything that the judge compares."""

from __future__ import annotations

import gc
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d import ThreeDPrecision, ThreeDStrategy
from lightning_3d.checkpoint import export_checkpoint
from lightning_3d.checkpoint.box import full_value
from lightning_3d.planning.plan import Plan
from lightning_3d.sharding.placement import interleaved_parameters
from tests.collectives import BlockInputs, Sent
from tests.law.cover import Case
from tests.law.habits import HABITS, Habit
from tests.law.settings import Setting
from tests.models import loader, reference_loader, training_loader
from tests.parity import QUIET, Held, Job, Layout, devices, held, splits
from tests.unchanged import (
    Code,
    Present,
    changed,
    changed_code,
    code_of_packages,
    state_of_the_process,
    state_of_torch,
)

Tensors = dict[str, Tensor]


@dataclass(kw_only=True)
class Run:
    """What one process saw; of tensors those that it holds anything of, full, by FQN."""

    initial: Tensors = field(default_factory=dict)
    gradients: list[Tensors] = field(default_factory=list)
    """Before every optimizer step; a parameter without a gradient is absent."""
    clipped: list[float] = field(default_factory=list)
    """The largest factor that clipping has multiplied an element of them by, where Lightning clips; of one process."""
    weights: Tensors = field(default_factory=dict)
    """Parameters and buffers after training."""
    trained: set[str] = field(default_factory=set)
    """The parameters that require grad after training."""
    logged: list[dict[str, float]] = field(default_factory=list)
    """`trainer.logged_metrics` after every batch."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`trainer.callback_metrics` after the run."""
    notes: list[tuple[str, float]] = field(default_factory=list)
    """What the habit noted."""
    rates: list[float] = field(default_factory=list)
    """Learning rates after the run."""
    checkpoint: dict[str, Any] = field(default_factory=dict)
    """What `save_checkpoint` wrote, on rank 0."""
    held: Held = field(default_factory=lambda: Held(parameters={}, optimizer_state={}))
    warned: list[str] = field(default_factory=list)
    inline: list[str] = field(default_factory=list)
    """What was said of steps and evaluations that run inline."""
    left: list[str] = field(default_factory=list)
    """Whatever is not as it was before the run."""
    plan: Plan | None = None
    sent: dict[str, tuple[Sent, Sent]] = field(default_factory=dict)
    """FQN of a tensor-parallel block -> what its forward and its backward sent; with tp alone."""


class Observer(L.Callback):
    """Fills a `Run` but for its gradients."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.run.initial = _full(pl_module, lambda tensor: tensor)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.run.logged.append({name: float(value) for name, value in trainer.logged_metrics.items()})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.run.weights = _full(pl_module, lambda tensor: tensor)
        self.run.trained = {name for name, parameter in pl_module.named_parameters() if parameter.requires_grad}
        self.run.held = held(pl_module, trainer.optimizers[0])
        self.run.rates = [group["lr"] for group in trainer.optimizers[0].param_groups]


class GradientObserver(Observer):
    """Also looks at gradients, which makes stages 1 and 2 of ZeRO gather them."""

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        self.run.gradients.append(_full(pl_module, lambda tensor: tensor.grad))


@torch.no_grad()
def _full(module: torch.nn.Module, pick: Callable[[Tensor], Tensor | None]) -> Tensors:
    """Of what this rank holds, full and in the order that one process has; a collective of the ranks that share it.

    Every rank gathers what it holds itself, so that a copy that is stale on one rank shows there.
    """
    parts, found = interleaved_parameters(module), {}
    for fqn, tensor in [*module.named_parameters(), *module.named_buffers()]:
        value = None if tensor.is_meta else pick(tensor)
        if value is not None and value.numel():
            full = full_value(value.detach())
            found[fqn] = (parts[fqn].deinterleaved(full) if fqn in parts else full).clone()
    return found


class _SeenClipped(L.LightningModule):
    """Measures what clipping does to gradients."""

    clipped: list[float]

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        before = {p: p.grad.clone() for p in self.parameters() if p.grad is not None}
        super().configure_gradient_clipping(*args, **kwargs)
        factors = [_largest_factor(p.grad, grad) for p, grad in before.items() if p.grad is not None]
        self.clipped.append(min(1.0, max(factors, default=1.0)))


def _largest_factor(found: Tensor, before: Tensor) -> float:
    changed = before != 0
    return float((found[changed] / before[changed]).nan_to_num().abs().max()) if changed.any() else 0.0


def _built(job: Job, lr: float, setting: Setting, habit: Habit) -> L.LightningModule:
    """The model with the law's optimizer and the habit's methods before its own."""
    L.seed_everything(job.seed, verbose=False)
    model = job.model()
    methods = {"configure_optimizers": lambda module: (habit.optimizers or setting.optimizer)(module, lr)}
    bases = [model.__class__] if habit.mixin is None else [habit.mixin, model.__class__]
    model.__class__ = type(model.__class__.__name__, tuple(bases), methods)
    if habit.mixin is not None and hasattr(model, "add_to"):
        model.add_to()  # type: ignore[operator]
    return model


@dataclass(frozen=True)
class Surroundings:
    """What the packages and the process have beside a run."""

    code: Code = field(default_factory=code_of_packages)
    of_torch: Present = field(default_factory=state_of_torch)
    of_the_process: Present = field(default_factory=state_of_the_process)

    def changes(self, after: Surroundings) -> list[str]:
        """What a run left changed."""
        states = changed(self.of_torch, after.of_torch) + changed(self.of_the_process, after.of_the_process)
        return changed_code(self.code, after.code) + states


last_known: list[Surroundings] = []
"""The surroundings after the last run of this process; empty if they are not known."""


def run_case(case: Case, layout: Layout | None) -> Run:
    """Train as a rank of a layout, or in this process with the plain Trainer if it is None."""
    if layout is None:
        return _trained(case, layout)
    if layout.compile_backend is not None:
        torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1))  # torch patches itself the first time
        last_known.clear()
    before = last_known[0] if last_known else Surroundings()
    run = _trained(case, layout)
    gc.collect()
    last_known[:] = [Surroundings()]
    run.left = before.changes(last_known[0]) + _open_files()
    return run


def _trained(case: Case, layout: Layout | None) -> Run:
    run, setting = Run(), case.setting_row
    told = _Told()
    with warnings.catch_warnings(record=True) as caught, _warns_each_time(), told:
        warnings.simplefilter("always")
        if setting.is_resumed and layout is not None:
            _train(case, Run(), case.first_layout, epochs=1, begun=None, saved="begun.ckpt")
            _train(case, run, layout, epochs=setting.epochs, begun="begun.ckpt", saved="final.ckpt")
        else:
            _train(case, run, layout, epochs=setting.epochs, begun=None, saved="final.ckpt")
    run.warned = [str(warning.message) for warning in caught]
    run.inline = [text for text in told.texts if "runs inline" in text or "run inline" in text]
    return run


class _Told(logging.Handler):
    """Collects what rank 0 says, as a context."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self._logger = logging.getLogger("lightning.pytorch")

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> None:
        self._logger.addHandler(self)

    def __exit__(self, *exception: object) -> None:
        self._logger.removeHandler(self)


@contextmanager
def _warns_each_time() -> Iterator[None]:
    """Have torch warn in each run of what it warns of once in a process, so that no run depends on those before."""
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(False)


def _open_files() -> list[str]:
    """Files of the run that are still open."""
    links = [Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    targets = [os.readlink(link) for link in links if link.exists()]
    return [f"open: {target}" for target in targets if target.startswith(os.getcwd() + "/")]


def _train(case: Case, run: Run, layout: Layout | None, *, epochs: int, begun: str | None, saved: str) -> None:
    setting, habit, job = case.setting_row, HABITS[case.habit], case.job
    observer = (GradientObserver if layout is None or setting.looks_at_gradients else Observer)(run)
    callbacks = habit.callbacks()
    if layout is not None and not job.sees_gradients:
        layout = replace(layout, zero_settings={"show_gradients": False, **layout.zero_settings})
    is_measured = layout is not None and case.measures_sent and layout.tp == layout.world_size  # not where it began
    inputs = BlockInputs() if is_measured else None
    trainer = L.Trainer(
        **{"enable_checkpointing": False, **QUIET, **habit.trainer(), **devices(layout, job.accelerator)},
        strategy="auto" if layout is None else layout.strategy(),
        **_precision(job, None if layout is None else setting.half),
        max_epochs=epochs,
        accumulate_grad_batches=job.accumulate_grad_batches,
        gradient_clip_val=job.gradient_clip_val,
        gradient_clip_algorithm=job.gradient_clip_algorithm,
        log_every_n_steps=1,
        callbacks=[*callbacks, observer, *([inputs] if inputs else [])],
    )
    with trainer.init_module() if setting.is_deferred else nullcontext():
        model = _built(job, case.model_row.lr, setting, habit)
    if layout is None:
        seen = type(model.__class__.__name__, (_SeenClipped, model.__class__), {"clipped": run.clipped})
        model.__class__ = seen
    train, val = splits(job)
    common: dict[str, Any] = {"global_batch_size": job.global_batch_size, "collate": job.collate}
    if layout is None:
        batches = reference_loader(train, seed=job.seed, **common)
    else:
        batches = training_loader(train, seed=job.seed, data_parallel_size=layout.dp, **common)
    others = loader(val, data_parallel_size=1 if layout is None else layout.dp, **common)
    trainer.fit(model, batches, others, ckpt_path=begun, weights_only=False)
    run.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    run.notes = [
        *getattr(model, "notes", ()),
        *(note for callback in callbacks for note in getattr(callback, "notes", ())),
        *habit.after(trainer, model, others),
    ]
    trainer.save_checkpoint(saved)
    if saved == "final.ckpt" and trainer.is_global_zero:
        run.checkpoint = _read(Path(saved))
    if isinstance(trainer.strategy, ThreeDStrategy):
        run.plan = trainer.strategy.plan
        with trainer.precision_plugin.dtype_of_steps():
            run.sent = inputs.sent(run.plan) if inputs else {}
        dist.barrier()  # rank 0 reads, and the folder of the run is removed


def _precision(job: Job, half: Literal["16-mixed"] | None) -> dict[str, Any]:
    return {"precision": job.precision} if half is None else {"plugins": [ThreeDPrecision(half)]}


def _read(path: Path) -> dict[str, Any]:
    """A checkpoint as one process writes it; a folder is converted."""
    if path.is_dir():
        export_checkpoint(path, "exported.ckpt", format="file", weights_only=False)
        path = Path("exported.ckpt")
    read: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return read
