"""A callback that tells how fast a run is, where its time goes, and what memory it takes.

[Note: sampled steps]
Most steps take two looks at the clock. One of every ``every_n_steps`` is measured phase by phase, and one, after the
shapes of batches have changed, counts operations while it runs.

    step      0          1                2 .. n - 2    n - 1                        n ..
              warms up   counts FLOPs                   is measured; all ranks
                                                        exchange their rows
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.profilers import PyTorchProfiler
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich.console import Console
from rich.live import Live
from rich.table import Table
from torch import Tensor
from torch.optim import Optimizer
from torch.profiler import profile, supported_activities

from lightning_3d.callbacks.peaks import peak_tflops
from lightning_3d.callbacks.rows import RowFile, rates, row_table, times_and_memory
from lightning_3d.callbacks.timeline import ScheduleTimeline
from lightning_3d.distributed.agreement import gather_objects
from lightning_3d.distributed.around_collectives import around_collectives
from lightning_3d.distributed.axes import ROLES
from lightning_3d.distributed.device_memory import host_memory
from lightning_3d.errors import ConfigError, StepError
from lightning_3d.memory.flop_counter import FlopCounter
from lightning_3d.pipeline.microbatches import num_samples
from lightning_3d.pipeline.spans import SpanRecorder
from lightning_3d.planning.timing import bubble
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.torch_internals.data_loops import around_fetches, logging_step
from lightning_3d.torch_internals.lightning_helpers import callbacks_of
from lightning_3d.torch_internals.pytree import tree_leaves

_MOST_ROWS = 2000  # that are kept for a picture
_UNMEASURED = "telemetry"
"""The phase of what this callback does in a step, which counts for none."""

_TRACED = 3
"""The step that is traced, counted from 0, or the next one that is not measured."""


class Telemetry(L.Callback):
    """Tells all loggers every some steps how fast a run is, where its time goes, its memory, and its gradients' norm.

    A step is an optimizer's, with all batches that it accumulates. The metrics:

    * ``samples_per_second``, ``tokens_per_second``, ``seconds_per_step``: of all replicas since the last row, without
      validation, and without the first step, which plans and compiles.
    * ``tflops_per_device``: of the model's forward and backward, by torch's formulas, without recomputation. What ranks
      compute alike, as code around the blocks in inline mode, counts on each. ``mfu``: this over the device's peak.
    * ``time/step``: seconds of the last step, as a mean over the ranks, and the parts that it is the sum of:
      ``time/data`` (waiting for batches), ``time/forward``, ``time/backward``, ``time/optimizer`` (with clipping),
      ``time/communication_<axes>`` (waiting for collectives along pp, dp, tp or several; what computation hides is not
      in it), ``time/bubble`` (waiting for what other pipeline ranks compute; part of ``communication_pp`` where steps
      run inline), ``time/other``. Compiled blocks' own collectives are part of their forward and backward.
    * ``memory/host``, ``memory/device``, and the ``_peak`` of each: bytes, on the rank that has most.
    * ``gradient_norm``: over all ranks, before clipping. ``loss_scale``: with fp16.

    Args:
        every_n_steps: Steps from row to row; by default the Trainer's ``log_every_n_steps``.
        tokens: Gives the number of tokens in a batch; by default the size of its first tensor of integers of shape
            (samples, tokens), if it has one.
        peak_tflops: Peak of one device in TFLOP/s; by default its datasheet's for the precision, where that is known.
        csv: Rank 0 writes each row to this file, with the memory of every rank; a resumed run appends.
        table: Whether rank 0 shows each row where its output is a terminal: in place, or below a progress bar.
        trace: Each rank writes a Chrome trace of one step, by torch's profiler, to ``rank<i>.json`` in this folder,
            with the names of blocks, stages and microbatches.

    Raises:
        ConfigError: a value that is not allowed, or another callback or profiler that measures the same.
        StepError: another strategy.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        *,
        tokens: Callable[[Any], int] | None = None,
        peak_tflops: float | None = None,
        csv: str | Path | None = None,
        table: bool = True,
        trace: str | Path | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ConfigError(f"Telemetry: every_n_steps={every_n_steps} must be at least 1")
        if peak_tflops is not None and peak_tflops <= 0:
            raise ConfigError(f"Telemetry: peak_tflops={peak_tflops} must be above 0")
        self.every_n_steps, self.tokens, self.peak_tflops, self.table = every_n_steps, tokens, peak_tflops, table
        self.csv, self.trace = (None if path is None else Path(path) for path in (csv, trace))
        self.metrics: dict[str, float] = {}
        """The last row, the same on all ranks."""
        self.rows: list[dict[str, float]] = []
        """The rows of a run, on rank 0; in a long run fewer of the older ones."""
        self.num_measured = 0
        """How many rows have the times of a step."""
        self.ranks: list[dict[str, float]] = []
        """On rank 0, of each rank: the last memory, and the times of all measured steps together."""
        self._run, self._measuring, self._counting = ExitStack(), ExitStack(), ExitStack()  # until each of them ends
        self._start = self._pause = 0.0
        self._forget_step()

    # ---- what Lightning calls

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy = self._checked(trainer)
        self._mesh, self._device = strategy.mesh, strategy.root_device
        self._interval: int = self.every_n_steps or trainer.log_every_n_steps or 50  # type: ignore[attr-defined]
        self._peak = self.peak_tflops or _known_peak(strategy, pl_module)
        if self._peak is None:
            rank_zero_info(f"Telemetry leaves out mfu: it knows no peak of {self._device}; set peak_tflops")
        self._phases = _phases(strategy)
        self._index, self._is_in_step, self._num_stepped = 0, False, trainer.global_step
        self._counted, self._is_traced = Counter[str](), self.trace is None
        self._shapes: list[torch.Size] | None = None
        self._norm: Tensor | None = None
        self._device_peak = 0
        self.rows, self.num_measured, self.ranks = [], 0, [{} for _ in range(self._mesh.shape.world_size)]
        self._open_outlets(trainer)
        self._begin_interval()
        self._prepare(trainer)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if not self._is_in_step:
            self._begin_step(_strategy(trainer), batch)
        if self._counter is not None:
            self._counting.enter_context(self._counter)
        self._done.update(samples=num_samples(batch), tokens=(self.tokens or _num_ids)(batch))
        self._enter("forward")

    def on_before_backward(self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor) -> None:
        self._enter("backward")

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._enter("optimizer" if pl_module.automatic_optimization else "forward")

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self._logs:
            with nullcontext() if self._recorder is None else self._recorder.during(_UNMEASURED):
                self._norm = _strategy(trainer).gradient_norm()
        self._enter("optimizer")
        if self._counter is not None:
            self._counter.is_on = False

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        self._enter("other")
        self._counting.close()
        if trainer.global_step == self._num_stepped:  # it accumulates
            return
        self._num_stepped, self._is_in_step = trainer.global_step, False
        self._end_step()
        if self._logs:
            self._log(trainer)
        if self._logs or self._index == 0:
            self._begin_interval()
        self._index += 1
        self._prepare(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._pause = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._start += time.perf_counter() - self._pause

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._close()
        if not self._is_traced:
            rank_zero_warn(f"Telemetry wrote no trace: the run ended before step {_TRACED}, counted from 0, had run")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._close()

    # ---- a run

    def _checked(self, trainer: L.Trainer) -> ThreeDStrategy:
        if not isinstance(trainer.strategy, ThreeDStrategy):
            raise StepError("Telemetry measures the ranks of strategy='3d': set it, or use ThroughputMonitor")
        if any(isinstance(callback, ScheduleTimeline) for callback in callbacks_of(trainer)):
            raise ConfigError("Telemetry and ScheduleTimeline both measure the schedule: leave out one of them")
        profiler = trainer.profiler  # type: ignore[attr-defined]  # set by the Trainer
        if self.trace is not None and isinstance(profiler, PyTorchProfiler):
            raise ConfigError(
                "Telemetry(trace=...) and PyTorchProfiler both use torch's profiler: leave out one of them"
            )
        return trainer.strategy

    def _open_outlets(self, trainer: L.Trainer) -> None:
        self._file: RowFile | None = None
        self._show: Callable[[Table], object] = lambda table: None
        if not trainer.is_global_zero:
            return
        if self.csv is not None:
            self._file = RowFile(self.csv, anew=trainer.global_step == 0)
        if self.table and (console := Console()).is_terminal:
            self._show = console.print
            if trainer.progress_bar_callback is None:
                live = self._run.enter_context(Live(console=console, auto_refresh=False))
                self._show = partial(live.update, refresh=True)

    def _begin_interval(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._start, self._total, self._has_counted = time.perf_counter(), Counter[str](), False

    def _close(self) -> None:
        for stack in (self._counting, self._measuring, self._run):
            stack.close()
        self._forget_step()

    # ---- a step

    def _forget_step(self) -> None:
        self._done = Counter(steps=1)  # work of this rank: steps, samples, tokens, operations
        self._logs = False  # whether a row follows
        self._recorder: SpanRecorder | None = None
        self._counter: FlopCounter | None = None

    def _prepare(self, trainer: L.Trainer) -> None:
        """Before the next step's batch is fetched."""
        self._forget_step()
        self._logs = self._index > 0 and (self._index + 1) % self._interval == 0
        if self._logs and not self._is_special:
            self._recorder = SpanRecorder(self._device)
            self._measuring.enter_context(around_fetches(trainer, self._fetching))

    @property
    def _is_special(self) -> bool:
        """Whether the next step may be traced, or count operations, so that its time is not measured."""
        if self._interval > 1:
            return not self._logs
        return not self._counted["flops"] or (self._index >= _TRACED and not self._is_traced)

    def _fetching(self) -> AbstractContextManager[None]:
        if not self._is_in_step:
            self._recorder = SpanRecorder(self._device)  # a fetch before this one has ended an epoch
        assert self._recorder is not None
        return self._recorder.during("data")

    def _begin_step(self, strategy: ThreeDStrategy, batch: object) -> None:
        self._is_in_step = True
        if self._recorder is not None:
            strategy.run.measure_steps(self._recorder)
            self._measuring.callback(strategy.run.measure_steps, None)
            self._measuring.enter_context(around_collectives(self._mesh.shape, self._communicating))
        elif self._is_special and self._index >= _TRACED and not self._is_traced:
            self._measuring.enter_context(profile(activities=supported_activities(), on_trace_ready=self._write_trace))
            self._measuring.callback(
                strategy.run.parallel.settle
            )  # the profiler can crash if it ends while a collective runs
        elif self._is_special and self._index > 0 and not self._has_counted and self._shapes != _shapes(batch):
            self._counter, self._shapes, self._has_counted = FlopCounter(), _shapes(batch), True
        if self._recorder is not None or self._counter is not None:
            for optimizer in strategy.optimizers:
                self._measuring.callback(optimizer.register_step_post_hook(self._stepped).remove)

    def _enter(self, phase: str) -> None:
        if self._recorder is not None:
            self._recorder.enter(phase)

    def _stepped(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._enter("other")
        if self._counter is not None:
            self._counter.is_on = True

    def _communicating(self, axes: str) -> AbstractContextManager[None]:
        if self._recorder is None or self._recorder.phase in ("waiting", _UNMEASURED):
            return nullcontext()
        name = f"communication_{axes}"
        return self._recorder.during(name if name in self._phases else "other")

    def _end_step(self) -> None:
        self._measuring.close()
        if self._counter is not None:
            self._counted = self._done + Counter(flops=self._counter.flops)
        self._total.update(self._done)

    def _write_trace(self, traced: profile) -> None:
        assert self.trace is not None
        self.trace.mkdir(parents=True, exist_ok=True)
        traced.export_chrome_trace(str(self.trace / f"rank{dist.get_rank()}.json"))
        self._is_traced = True

    # ---- a row

    def _log(self, trainer: L.Trainer) -> None:
        own: dict[str, float] = {**self._total, **{f"counted_{name}": self._counted[name] for name in self._counted}}
        own |= self._memory() | self._times()
        own["seconds"] = time.perf_counter() - self._start  # the times were read from the device
        everyone = gather_objects(own)
        row: dict[str, float | None] = {"step": trainer.global_step, **rates(everyone, self._mesh.shape, self._peak)}
        row |= times_and_memory(everyone, self._phases)
        row["gradient_norm"] = None if self._norm is None else float(self._norm)
        if (precision := _precision(_strategy(trainer))).scales_losses:
            row["loss_scale"] = precision.loss_scale
        self.metrics = {name: value for name, value in row.items() if value is not None}
        if trainer.is_global_zero:
            self.rows = [*self.rows[:: 2 if len(self.rows) == _MOST_ROWS else 1], self.metrics]
            self.num_measured += "time/step" in self.metrics
            for kept, rank in zip(self.ranks, everyone, strict=True):
                kept |= {name: value for name, value in rank.items() if name.startswith("memory/")}
                kept |= {name: kept.get(name, 0.0) + rank[name] for name in rank if name.startswith("time/")}
        self._show(row_table(self.metrics))
        if self._file is not None:
            names = [name for name in own if name.startswith("memory/")]
            by_rank = {f"{name}/rank{i}": rank[name] for name in names for i, rank in enumerate(everyone)}
            self._file.write({**row, **by_rank})
        for logger in trainer.loggers:
            logger.log_metrics(self.metrics, step=logging_step(trainer))

    def _times(self) -> dict[str, float]:
        """Seconds of the phases of this rank's step, if they were measured; all ranks of a pipeline call it."""
        if self._recorder is None:
            return {}
        found = self._recorder.seconds()
        found.pop(_UNMEASURED, None)
        if (waiting := found.pop("waiting", None)) is not None:
            own = self._recorder.runs()
            ranks = gather_objects(own, self._mesh.group("pp"))
            waited = sum(bubble(spans, self._mesh.pp_rank) for spans in zip(*ranks, strict=True))
            found["bubble"] = min(waited, waiting)
            found["communication_pp"] = found.get("communication_pp", 0.0) + waiting - found["bubble"]
        times = {f"time/{phase}": found.get(phase, 0.0) for phase in self._phases}
        return {"time/step": sum(found.values()), **times}

    def _memory(self) -> dict[str, float]:
        now, peak = host_memory()
        found: dict[str, float] = {"memory/host_peak": peak}
        if now is not None:
            found["memory/host"] = now
        if self._device.type != "cpu":
            with suppress(RuntimeError):  # there are devices whose memory torch does not count
                self._device_peak = max(self._device_peak, torch.accelerator.max_memory_allocated(self._device))
                found["memory/device"] = torch.accelerator.memory_allocated(self._device)
                found["memory/device_peak"] = self._device_peak  # others may have reset the device's own
        return found


def _strategy(trainer: L.Trainer) -> ThreeDStrategy:
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy


def _phases(strategy: ThreeDStrategy) -> list[str]:
    """The parts of a step's time in this layout."""
    plan = strategy.plan
    axes = [name for name, size in plan.shape.sizes.items() if size > 1]
    replica = [name for name in axes if name in ROLES["replica"]]
    communication = dict.fromkeys("_".join(ranks) for ranks in ([axis] for axis in axes))
    communication |= dict.fromkeys("_".join(ranks) for ranks in (replica, axes) if ranks)
    bubbles = ["bubble"] if plan.shape.pp > 1 and plan.inline is None else []
    phases = ("data", "forward", "backward", "optimizer")
    return [*phases, *(f"communication_{ranks}" for ranks in communication), *bubbles, "other"]


def _known_peak(strategy: ThreeDStrategy, module: L.LightningModule) -> float | None:
    """That of the device's datasheet, in the dtype that steps compute in."""
    if strategy.root_device.type != "cuda":
        return None
    dtypes = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    dtype = _precision(strategy).casts_to or next(iter(dtypes), torch.float32)
    return peak_tflops(torch.cuda.get_device_name(strategy.root_device), dtype, torch.get_float32_matmul_precision())


def _precision(strategy: ThreeDStrategy) -> ThreeDPrecision:
    assert isinstance(strategy.precision_plugin, ThreeDPrecision)
    return strategy.precision_plugin


def _num_ids(batch: object) -> int:
    """Elements of the first tensor of shape (samples, tokens) that can be ids; 0 if there is none."""
    tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim == 2)
    return next((t.numel() for t in tensors if t.dtype in (torch.int64, torch.int32)), 0)


def _shapes(batch: object) -> list[torch.Size]:
    return [leaf.shape for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
