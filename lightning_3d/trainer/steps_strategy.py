"""``StepsStrategy``: the steps of a model that is parallel, and of its optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.pipeline.microbatches import detached_from_inference
from lightning_3d.pipeline.spans import SpanRecorder
from lightning_3d.planning.plan import Plan
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.trainer.optimizers import TrainedOptimizers
from lightning_3d.trainer.parallel_model import ParallelModel
from lightning_3d.trainer.ranks_strategy import RanksStrategy


class StepsStrategy(RanksStrategy):
    """Runs the steps of a model and of its optimizers, once the model has been made parallel."""

    _trained: TrainedOptimizers | None = None  # in a fit
    _parallel: ParallelModel | None = None
    _names_before_sharding: Mapping[nn.Parameter, str] = MappingProxyType({})
    _num_steps = 0  # steps of any kind that ran, for their random numbers
    _accumulating = False
    _is_stepping = False  # inside of a step method of the user's

    @property
    def plan(self) -> Plan:
        """The plan of what lies where; there once the Trainer has set the strategy up. Printable by rich.

        Raises:
            StepError: This process has no model yet, or never, as that of a notebook whose ranks are others.
        """
        if self._parallel is None:
            raise StepError(
                "strategy.plan is there once a Trainer has set the model up in this process: read it from on_fit_start"
                " on; with the ranks of a notebook, which are other processes, only in a callback"
            )
        return self._parts.present_plan

    @property
    def _parts(self) -> ParallelModel:
        assert self._parallel is not None, "the model is made parallel in setup"
        return self._parallel

    # ---- precision

    @property
    def _precision(self) -> ThreeDPrecision:
        plugin = self.precision_plugin
        assert isinstance(plugin, ThreeDPrecision)
        return plugin

    @property
    @override
    def precision_plugin(self) -> Precision:
        return self._precision_plugin or ThreeDPrecision()

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        # The accelerator connector reads the attribute: as long as it is None, the Trainer's `precision` counts.
        self._precision_plugin = None if precision_plugin is None else ThreeDPrecision.translate(precision_plugin)

    # ---- optimizers

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        self._leave_optimizers()
        super().setup_optimizers(trainer)
        self._train_with(self.optimizers, trainer)

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Also in training, where others may take the place of those that were there."""
        ParallelStrategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]  # a property
        if self._trained is not None and self._trained.optimizers != optimizers:
            self._leave_optimizers()
            self._train_with(optimizers, self._module.trainer)

    def _leave_optimizers(self) -> None:
        """Let other optimizers take their place; gradients that have accumulated are whole, and theirs."""
        self._parts.zero.shows_gradients = True
        self._parts.zero.gather_grads()
        if self._trained is not None:
            self._trained.close()
            self._trained = None

    def _train_with(self, optimizers: list[Optimizer], trainer: Trainer) -> None:
        self._trained = TrainedOptimizers(
            optimizers,
            self._parts,
            self._names_before_sharding,
            trainer=trainer,
            module=self._module,
            config=self.config,
            mesh=self.mesh,
            precision=self._precision,
            device=self.root_device,
        )

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        assert self._trained is not None
        with self._trained.step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # ---- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._trained is not None
        if self._control is not None:
            self._control.begin_batch()
        self._trained.begin_batch()
        batch, *rest = (*args, *kwargs.values())
        with self._stepping(are_buffers_due=not self._accumulating), self._precision.train_step_context():
            batch = self._parts.guard(batch)
            if self._parts.budget is not None:
                self._parts.budget.look_at(batch)
            return self._parts.runner.train(batch, rest, number=self._num_steps, accumulating=self._accumulating)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self._precision.val_step_context(), *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self._precision.test_step_context(), *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self._precision.predict_step_context(), *args, *kwargs.values())

    def _evaluate(self, name: str, precision: AbstractContextManager[None], batch: Any, *rest: Any) -> Any:
        # DTensors do not survive inference mode.
        with precision, self._stepping(are_buffers_due=False), torch.inference_mode(False), torch.no_grad():
            batch = self._parts.guard(detached_from_inference(batch))
            return self._parts.runner.evaluate(name, batch, rest, number=self._num_steps)

    @contextmanager
    def _stepping(self, *, are_buffers_due: bool) -> Iterator[None]:
        """Around a step, after which buffers may be due to be shared."""
        self._met.sync_point()
        self._num_steps += 1
        self._parts.zero.begin_forward()
        self._parts.buffers.before_step(are_due_after=are_buffers_due)
        self._is_stepping = True
        try:
            with self._met.in_lockstep():
                yield
        finally:
            self._is_stepping = False
        num, seconds = self._parts.compiling.take()
        if num:
            rank_zero_info(f"Compiling blocks took {seconds:.1f} s, for {num} kinds of calls.")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self._parts.runner.around_backward(closure_loss, accumulating=self._accumulating):
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if not self._module.automatic_optimization:
            self._precision.after_manual_backward()
        if not self._accumulating:
            self._parts.zero.wait_params()
        return loss

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def on_validation_end(self) -> None:
        self.settle()

    # ---- what users call

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients as if they lay in one process; 0-d, equal on all ranks. Every rank calls it.

        Raises:
            StepError: a rank calls it alone.
        """
        self._met.sync_check(range(self.mesh.shape.world_size), "gradient_norm")
        return self._parts.gradients.norm(norm_type=norm_type)

    def _norm_of(self, parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
        self._met.sync_check(range(self.mesh.shape.world_size), "a norm of gradients, as clip_grad_norm_ takes it")
        return self._parts.gradients.norm(parameters, norm_type)

    def measure_steps(self, recorder: SpanRecorder | None) -> None:
        """Have the schedules of the steps that follow measured by this, or by none. Every rank calls it."""
        if (engine := self._parts.runner.engine) is not None:
            engine.recorder = recorder

    def settle(self) -> None:
        """Wait for what the last step still communicates."""
        self._parts.zero.wait_params()
        self._parts.guard.settle()
