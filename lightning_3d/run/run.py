"""``Run``: one run of the Trainer, such as a fit, from the first collective of its processes to the last.

begin            processes connect, and have their places                      ranks.py
decide           the layout, where it is open; what can't run; the plan        decide/
make_parallel    the plan is carried out, one part after the other             parallel/
open             what holds around steps; optimizers, checkpoints, signals     session.py, optimizers.py
steps            training, evaluation, backward                                steps.py, step/
close            all of it is undone, each part also where another raises
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch.optim import Optimizer

from lightning_3d.checkpoint.trainer_io import ThreeDCheckpointIO
from lightning_3d.config.deepspeed import FromDeepSpeed
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.resuming import Resuming
from lightning_3d.parts.copies import copies_of
from lightning_3d.parts.layout import is_laid_out, unshard
from lightning_3d.pipeline.spans import SpanRecorder
from lightning_3d.planning.layouts import Choice
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run.context import RunContext
from lightning_3d.run.decide.accumulation import batches_per_step
from lightning_3d.run.decide.auto_layout import choose_layout
from lightning_3d.run.decide.plan_model import Planned, plan_model
from lightning_3d.run.decide.requirements import check_run
from lightning_3d.run.optimizers import TrainedOptimizers
from lightning_3d.run.parallel.make_parallel import make_parallel
from lightning_3d.run.parallel.parallel_model import ParallelModel
from lightning_3d.run.ranks import ProcessSettings, Ranks, number_of_processes
from lightning_3d.run.report import tell_layout
from lightning_3d.run.session import open_before_layout, open_before_planning, open_for_steps
from lightning_3d.run.steps import Steps
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.data_loops import called_before_stops
from lightning_3d.torch_internals.patches import replaced


class Run:
    """A run; its model stays parallel after it, so that a Trainer may go on, and users may read it.

    Args:
        given: The strategy's settings.
        deepspeed: The DeepSpeed config that they are from.
        before: The Trainer's run before it.
    """

    def __init__(
        self,
        strategy: ParallelStrategy,
        processes: ProcessSettings,
        given: ThreeDConfig,
        *,
        deepspeed: FromDeepSpeed | None = None,
        before: Run | None = None,
    ) -> None:
        self._strategy, self._given, self._deepspeed = strategy, given, deepspeed
        self.ranks: Ranks = Ranks(strategy, processes, None if before is None else before.ranks)
        self.config: ThreeDConfig = given if before is None else before.config
        """In force: as given, and with the layout that was chosen."""
        self.choice: Choice | None = None if before is None else before.choice
        """The layout that a fit has chosen, and why."""
        self._planned: Planned | None = None  # until it is carried out
        self._parallel: ParallelModel | None = None if before is None else before._parallel
        self._steps: Steps | None = None if before is None else before._steps
        self._dataclasses: list[type[Any]] = [] if before is None else before._dataclasses  # pytrees in a run
        self.optimizers: TrainedOptimizers | None = None
        """In a fit."""
        io = ThreeDCheckpointIO(strategy, given, processes.timeout) if before is None else before.checkpoints
        self.checkpoints: ThreeDCheckpointIO = io
        self.resuming: Resuming | None = None
        """In a fit: notes where it is."""
        self.resumes: Mapping[str, Any] | None = None
        """The state of the fit that this one goes on with, until it does."""
        self.batches_per_step: int = 1
        """In a fit with ``samples_per_step``: those that a replica accumulates."""
        self.restores_late: bool | None = None
        """Whether checkpoints are restored after setup; known once the model is built."""
        self.keeps_replicas_order: bool = False
        """Whether the fit goes on from several replicas, whose order of samples one replica keeps, too."""

    # ---- what it owns

    @property
    def module(self) -> LightningModule:
        """The Trainer's model."""
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs."""
        return self.module.trainer

    @property
    def context(self) -> RunContext:
        """The objects that phases go by."""
        precision = self._strategy.precision_plugin
        assert isinstance(precision, ThreeDPrecision)
        return RunContext(
            trainer=self.trainer,
            module=self.module,
            config=self.config,
            mesh=self.ranks.mesh,
            rendezvous=self.ranks.rendezvous,
            precision=precision,
            device=self._strategy.root_device,
        )

    @property
    def is_parallel(self) -> bool:
        """Whether the model has been made parallel."""
        return self._parallel is not None

    @property
    def parallel(self) -> ParallelModel:
        """The model as this rank trains it."""
        assert self._parallel is not None, "the model is made parallel in setup"
        return self._parallel

    @property
    def steps(self) -> Steps:
        """Runs the user's steps."""
        assert self._steps is not None, "steps are there after setup"
        return self._steps

    # ---- its phases

    def begin(self) -> None:
        """Connect the processes and give each its place; a model that is as this strategy laid it out stays so."""
        trainer, parallel = self.trainer, self._parallel
        is_ready = parallel is not None and is_laid_out(self.module, parallel.layout)
        if not is_ready:
            self.config = self._given
        world_size = trainer.num_nodes * number_of_processes(self._strategy)
        self.ranks.open(trainer, self.config, world_size)
        plans = self.is_fit and self.config.activations.plans_memory
        if parallel is None or not is_ready or (plans and parallel.budget is None):  # planned without a training step
            unshard(self.module, copies_of(self.module, lightning_helpers.callbacks_of(trainer)))
            self._parallel = None

    def decide(self) -> None:
        """Choose a layout where none is given, refuse what it can't run, and plan a model that is as it was built."""
        if self.is_fit:
            reads_again = self.config.batch.resume == "exact"
            self.resuming = Resuming(self.trainer, self.module, self._strategy.root_device, reads_again=reads_again)
        open_before_layout(self.ranks.session, self.context, self._dataclasses, self.resuming)
        if self.is_fit:
            self._choose_layout()
            if self.config.samples_per_step is not None:
                self.batches_per_step = batches_per_step(self.context, self.config.samples_per_step)
                accumulated = {"accumulate_grad_batches": self.batches_per_step}
                self.ranks.session.enter_context(replaced("accumulation", self.trainer, accumulated))
        check_run(self.context, self._deepspeed)
        open_before_planning(self.ranks.session, self.config, self.ranks.mesh)
        self._planned = None if self.is_parallel else plan_model(self.context)

    def make_parallel(self) -> None:
        """Carry out what was decided."""
        planned, self._planned = self._planned, None
        if planned is not None:
            self._parallel = make_parallel(planned)

    def open(self) -> None:
        """Enter what holds around steps, make the optimizers of a fit, and heed signals together."""
        context, control = self.context, self.ranks.control
        number = 0 if self._steps is None else self._steps.number
        self._steps = Steps(context, self.parallel, number)
        open_for_steps(self.ranks.session, context, self.parallel)
        if self.is_fit:
            lightning_helpers.reset_optimizers(self._strategy)
            self._show_gradients()
            self._strategy.setup_optimizers(self.trainer)
            self.train_with(self._strategy.optimizers)
            tell_layout(context, self.parallel, self._strategy.optimizers)
        self.checkpoints.begin(self.trainer, context.mesh, self.parallel.zero)
        self._strategy.setup_precision_plugin()
        if control is not None and self.is_fit:
            self.ranks.session.enter_context(called_before_stops(self.trainer, self._meet_at_end))
            control.handle_signals_collectively()

    def close(self) -> None:
        """Undo all that lasts as long as the run; last first, each part also where others raise."""
        trained, self.optimizers = self.optimizers, None
        with ExitStack() as ending:
            ending.callback(self.checkpoints.teardown)
            ending.callback(self.ranks.close)
            if trained is not None:
                ending.callback(trained.close)
            ending.callback(self.checkpoints.saves.finish_alone)  # also those of callbacks that save on exceptions

    def fail(self, error: BaseException) -> Exception | None:
        """Another exception to raise in place of one that ends the run, if any."""
        self.checkpoints.saves.finish_alone()
        return self.ranks.fail(self.trainer, error)

    # ---- parts of them

    @property
    def is_fit(self) -> bool:
        """Whether the model is trained."""
        return self.context.is_fit

    def _choose_layout(self) -> None:
        """Choose it where nothing of it is set, for a model that is not parallel yet."""
        is_chosen = self.is_parallel or self._deepspeed is not None or not self.config.is_planned
        if is_chosen or self.ranks.mesh.shape.world_size == 1:
            return
        self.choice = choose_layout(self.context, number_of_processes(self._strategy))
        if self.choice is not None:
            self.config = self.choice.of(self.config)
            self.ranks.change_mesh(self.trainer, self.config)

    def train_with(self, optimizers: Sequence[Optimizer]) -> TrainedOptimizers:
        """Let these step the model from now on. Others may take the place of those that there were in training, too."""
        if self.optimizers is not None and self.optimizers.optimizers == optimizers:
            return self.optimizers
        self._show_gradients()
        if self.optimizers is not None:
            self.optimizers.close()
            self.optimizers = None
        self.optimizers = TrainedOptimizers(optimizers, self.parallel, self.context)
        return self.optimizers

    def _show_gradients(self) -> None:
        """Let gradients that have accumulated be whole, and the next optimizers' to take."""
        self.parallel.zero.shows_gradients = True
        self.parallel.zero.gather_grads()

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the step of an optimizer."""
        with self.train_with(self._strategy.optimizers).step(optimizer):
            yield

    def begin_batch(self) -> None:
        """Before a training step."""
        optimizers = self.train_with(self._strategy.optimizers)
        if self.ranks.control is not None:
            self.ranks.control.begin_batch()
        optimizers.begin_batch()

    def measure_steps(self, recorder: SpanRecorder | None) -> None:
        """Have the schedules of the steps that follow measured by this, or by none. Every rank calls it."""
        if (engine := self.parallel.runner.engine) is not None:
            engine.recorder = recorder

    def end_training(self) -> None:
        """After the last batch, before the hooks that follow."""
        if self.trainer.should_stop:
            self._meet_at_end()
        self.ranks.rendezvous.sync_point()
        self.parallel.settle()
        if self.ranks.control is not None:
            self.ranks.control.handle_signals_collectively()
        self.checkpoints.is_training = False  # those of hooks that follow are not written in the background
        self.checkpoints.saves.wait()

    def _meet_at_end(self) -> None:
        """Raise where this rank alone ends the fit, for which others would wait."""
        self.ranks.sync_check("the end of training, as by trainer.should_stop = True")
