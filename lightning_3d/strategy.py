"""``ThreeDStrategy``: what Lightning's Trainer calls. ``setup`` shows the order of things; the work is elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_3d.checkpoint.run_state import RUN, gather_ranks, of_this_rank
from lightning_3d.checkpoint.trainer_io import ThreeDCheckpointIO
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.config.compile import CompileConfig
from lightning_3d.config.configured import Configured
from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.config.settings import BatchConfig, ThreeDConfig
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.data.resuming import Resuming
from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.errors import StepError
from lightning_3d.model.initial_weights import is_on_meta
from lightning_3d.model.unbuilt import building, is_unbuilt
from lightning_3d.parts.copies import copies_of
from lightning_3d.parts.layout import (
    check_layout,
    full_modules,
    has_some_layout,
    is_laid_out,
    summoned,
    unshard,
)
from lightning_3d.planning.layouts import Choice
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.data_loops import called_before_stops
from lightning_3d.torch_internals.launchers import RunLauncher
from lightning_3d.trainer.auto_layout import choose_layout
from lightning_3d.trainer.compiled_code import uncompile, warn_of_compiled
from lightning_3d.trainer.parallel_model import ParallelModel, make_parallel
from lightning_3d.trainer.report import RankReport, gather_reports, tell_layout
from lightning_3d.trainer.requirements import check, check_model
from lightning_3d.trainer.session import open_before_layout, open_before_planning, open_for_steps
from lightning_3d.trainer.steps_strategy import StepsStrategy
from lightning_3d.waits import long_wait

_NO_PATHS = (None, "best", "last", "hpc", "registry")
"""Values of ``ckpt_path`` for which there may be no checkpoint."""


class ThreeDStrategy(Configured, StepsStrategy):
    """Trains any LightningModule in data (ZeRO) x pipeline x tensor parallel; ``Trainer(strategy="3d")``.

    Args:
        pipeline_parallel_size: Number of pipeline stages.
        data_parallel_size: Number of model replicas; ``"auto"`` fills the world size.
        tensor_parallel_size: Ranks that share each block's weights.
        context_parallel_size: Ranks that share each sequence; more than 1 is planned, and not run yet.
        zero: A ``ZeroConfig`` or a dict of its keys.
        pipeline: A ``PipelineConfig`` or a dict of its keys.
        tensor: A ``TensorConfig`` or a dict of its keys.
        activations: An ``ActivationsConfig`` or a dict of its keys.
        compile: A ``CompileConfig`` or a dict of its keys.
        batch: A ``BatchConfig`` or a dict of its keys.
        precision: A ``PrecisionConfig`` or a dict of its keys; ``Trainer(precision=...)`` picks the precision itself.
        checkpoint: A ``CheckpointConfig`` or a dict of its keys.
        save_distributed_checkpoint: ``True`` writes a folder with every rank's part, ``False`` one ``.ckpt`` file;
            ``"auto"`` a file, or a folder where that would be larger than ``checkpoint.max_file_size``.
        process_group_backend: ``"nccl"``, ``"gloo"``, ...; by default the one for the device, beside gloo for objects:
            ``"cpu:gloo,cuda:nccl"``.
        timeout: The timeout of collectives.
        heartbeat_timeout: All ranks end when the process of one has given no sign of life for so long.
        start_method: ``"popen"`` starts the other processes of a node by running the script again; ``"fork"`` forks all
            of them from the script's, as in a notebook, with what it has imported: it is no rank then.
        layout: ``"planned"`` lets a fit choose what is left at its default of the sizes, ``zero.stage``, microbatches
            and recomputation; ``"given"`` takes all as it is here; ``"auto"`` is planned where none of them is set.

    Raises:
        ConfigError: a key or value that is not allowed.
    """

    def __init__(
        self,
        pipeline_parallel_size: int = 1,
        data_parallel_size: int | Literal["auto"] = "auto",
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
        zero: ZeroConfig | dict[str, Any] | None = None,
        pipeline: PipelineConfig | dict[str, Any] | None = None,
        tensor: TensorConfig | dict[str, Any] | None = None,
        activations: ActivationsConfig | dict[str, Any] | None = None,
        compile: CompileConfig | dict[str, Any] | None = None,
        batch: BatchConfig | dict[str, Any] | None = None,
        precision: PrecisionConfig | dict[str, Any] | None = None,
        checkpoint: CheckpointConfig | dict[str, Any] | None = None,
        save_distributed_checkpoint: bool | Literal["auto"] = "auto",
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=30),
        heartbeat_timeout: timedelta = timedelta(minutes=2),
        start_method: Literal["popen", "fork"] = "popen",
        layout: Literal["auto", "planned", "given"] = "auto",
    ) -> None:
        given = locals()
        config = ThreeDConfig.from_mapping({field.name: given[field.name] for field in fields(ThreeDConfig)})
        super().__init__(config, process_group_backend, timeout, heartbeat_timeout, start_method)
        self._given: ThreeDConfig | None = None  # before a fit chose what it leaves open
        self.choice: Choice | None = None
        """The layout that a fit has chosen, and why."""
        self._checkpoints = self._new_checkpoints()
        self._resuming: Resuming | None = None  # in a fit
        self._resumes: Mapping[str, Any] | None = None  # the state of the run that this one goes on with, until it does
        self._restores_late: bool | None = None  # after setup; known once the model is built
        self._is_empty = False  # the model was built on the meta device, and is not restored yet
        self._dataclasses: list[type[Any]] = []  # pytrees while a Trainer runs

    def _new_checkpoints(self) -> ThreeDCheckpointIO:
        return ThreeDCheckpointIO(self, self.config, self._timeout)

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the model, and none of what belongs to the processes and their run."""
        state: dict[str, Any] = super().__getstate__()
        of_run = ("_mesh", "_control", "_rendezvous", "_parallel", "_trained", "_checkpoints", "_resuming", "_resumes")
        return {**state, **dict.fromkeys(of_run), "_session": ExitStack(), "_names_before_sharding": {}}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._checkpoints = self._new_checkpoints()
        if self._launcher is not None:
            self._configure_launcher()

    # ---- the model

    def _own_parts(self, what: str) -> ParallelModel:
        check_layout(self._module, None if self._parallel is None else self._parallel.layout, what)
        return self._parts

    @property
    def _is_as_built(self) -> bool:
        """Whether no Trainer has run the model, so that rank 0 has the whole of it."""
        return self._parallel is None and not has_some_layout(self._module)

    @property
    def _is_in_parts(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self.mesh.shape.is_model_parallel or self.config.zero.is_fully_sharded(self.mesh.shape.dp)

    @property
    def _lightning_module(self) -> LightningModule | None:
        return self._trained_module

    @_lightning_module.setter
    def _lightning_module(self, module: LightningModule | None) -> None:
        """The Trainer sets it first of all, and then refuses modules that were compiled as a whole."""
        self._trained_module = module
        if module is not None:
            uncompile(module)

    @override
    def model_to_device(self) -> None:
        """Nothing: every rank moves what it holds when the model is made parallel."""

    # ---- the order of things

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """For ``configure_model`` and ``trainer.init_module()``: with a pipeline, rank 0 builds the model, in host
        memory, and the others get the weights of their stages when it is set up, and never hold those of other stages.
        """
        is_in_stages = self.config.pipeline_parallel_size > 1
        built = building(is_first=self.global_rank == 0) if is_in_stages else nullcontext()
        with super().tensor_init_context(empty_init), built:
            yield

    @override
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self.give_optimizers(model)

    @override
    def setup_environment(self) -> None:
        self._restores_late = self._resuming = self._resumes = None
        trainer, parallel = self._module.trainer, self._parallel
        is_ready = parallel is not None and is_laid_out(self._module, parallel.layout)  # by this strategy, and as it is
        if not is_ready and self._given is not None:
            self.config, self._given = self._given, None
        super().setup_environment()
        plans = trainer.state.fn == TrainerFn.FITTING and self.config.activations.plans_memory
        if parallel is None or not is_ready or (plans and parallel.budget is None):  # planned without a training step
            unshard(self._module, copies_of(self._module, lightning_helpers.callbacks_of(trainer)))
            self._parallel = None

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            reads_again = self.config.batch.resume == "exact"
            self._resuming = Resuming(trainer, self._module, self.root_device, reads_again=reads_again)
        open_before_layout(self._session, self._dataclasses, self._resuming)
        if is_fit:
            self._choose_layout(trainer)
            self.check_deepspeed(trainer, self._precision.precision, self.mesh.shape.dp)
        self.config.precision.check_for(self._precision.precision)
        check(trainer, self, self._module, self.config, self.mesh.shape)
        open_before_planning(self._session, self.config, self.mesh)
        if self._parallel is None:
            self._parallel = self._made_parallel(trainer)
        open_for_steps(self._session, self._module, self._parallel, self._norm_of, is_in_parts=self._is_in_parts)
        if is_fit:
            lightning_helpers.reset_optimizers(self)
            self.setup_optimizers(trainer)
            tell_layout(trainer, self._parallel, self.optimizers, self.config, self.mesh, self.root_device)
        self._checkpoints.begin(trainer, self.mesh, self._parallel.zero)
        self.setup_precision_plugin()
        if self._control is not None and is_fit:
            self._session.enter_context(called_before_stops(trainer, self._meet_at_end))
            self._control.handle_signals_collectively()

    def _meet_at_end(self) -> None:
        """Raise where this rank alone ends the fit, for which others would wait."""
        self._met.sync_check(range(self.mesh.shape.world_size), "the end of training, as by trainer.should_stop = True")

    def _choose_layout(self, trainer: Trainer) -> None:
        """Choose it where nothing of it is set, for a model that is not parallel yet."""
        is_chosen = self._parallel is not None or self.deepspeed is not None or not self.config.is_planned
        if is_chosen or self.mesh.shape.world_size == 1:
            return
        module, config, shape = self._module, self.config, self.mesh.shape
        self.choice = choose_layout(
            trainer, module, config, shape, self._precision, self.root_device, self.num_processes
        )
        if self.choice is not None:
            self._given, self.config = self.config, self.choice.of(self.config)
            self._change_mesh()

    def _made_parallel(self, trainer: Trainer) -> ParallelModel:
        check_model(self._module, self.config, self.mesh.shape)
        assert isinstance(self._launcher, RunLauncher)
        self._is_empty = is_on_meta(self._module)
        self._names_before_sharding = WeakIdKeyDictionary({p: fqn for fqn, p in self._module.named_parameters()})
        self._precision.convert(self._module, self.config.precision, self.root_device)
        if (syncing := lightning_helpers.layer_sync_of(self)) is not None and self.mesh.shape.dp > 1:
            syncing.apply(self._module)
        if self.mesh.shape.is_model_parallel:
            warn_of_compiled(self._module)
        if self.mesh.shape.is_model_parallel or self.config.activations.plans_memory:
            lightning_helpers.leave_out_module_names(trainer)
        with long_wait(f"Making {type(self._module).__name__} parallel"):
            return make_parallel(
                trainer=trainer,
                module=self._module,
                config=self.config,
                mesh=self.mesh,
                precision=self._precision,
                device=self.root_device,
                rendezvous=self._met,
                is_restored=self._launcher.ckpt_path not in _NO_PATHS,
            )

    @override
    def teardown(self) -> None:
        trained, self._trained = self._trained, None
        with ExitStack() as ending:  # last first, each also where others raise
            ending.callback(self._checkpoints.teardown)
            ending.callback(self.take_optimizers, self._module)
            ending.callback(super().teardown)
            if trained is not None:
                ending.callback(trained.close)

    @override
    def _fail(self, error: BaseException) -> Exception | None:
        self._checkpoints.saves.finish_alone()
        return super()._fail(error)

    @override
    def on_train_start(self) -> None:
        self._checkpoints.is_training = True
        resumes, self._resumes = self._resumes, None
        if resumes is not None:
            assert self._resuming is not None
            self._parts.randomness.seed, self._num_steps = resumes["steps"]["seed"], resumes["steps"]["number"]
            self._resuming.load_state(of_this_rank(resumes, self.mesh))

    @override
    def on_train_end(self) -> None:
        if self._module.trainer.should_stop:
            self._meet_at_end()
        self._met.sync_point()
        self.settle()
        if self._control is not None:
            self._control.handle_signals_collectively()
        self._checkpoints.is_training = False  # those of hooks that follow are not written in the background
        self._checkpoints.saves.wait()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._checkpoints.saves.finish_alone()  # of callbacks that save when there is one

    # ---- what users call

    def report(self) -> list[RankReport]:
        """The share of the model that each rank holds, by rank. Every rank calls it; ``report_table`` shows it."""
        offloads = self.config.zero.offload_optimizer != "none"
        return gather_reports(self._module, self.optimizers, self.mesh, self.root_device, offloads=offloads)

    @override
    @contextmanager
    def summon_full_params(self, module: nn.Module | None = None, *, writeback: bool = True) -> Iterator[None]:
        """Let the model be plain and whole on every rank inside, as one process has it, in every layout: to be read,
        written, called, saved or copied; also after ``fit``.

        Every rank enters and leaves, and has memory for the whole model (or the given module of it) once more. Inside,
        steps of the Trainer and of optimizers must not run; gradients of backwards inside are lost when it ends.

        Args:
            module: The LightningModule (by default), a module in it, or a copy of it.
            writeback: Whether what is written inside stays; all ranks must write the same.

        Raises:
            StepError: a step is running, or another Trainer has run the model since.
        """
        if self._is_stepping:
            raise StepError(
                "summon_full_params was entered in a step, whose pipeline stages and units hold parts of the model. Do"
                " it in a hook or after fit."
            )
        parts = self._own_parts("summon_full_params was called")
        parts.zero.wait_params()
        with summoned(parts.layout, module, self._met, is_in_parts=self._is_in_parts, writeback=writeback):
            yield

    # ---- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Before it, as with DDP, unless ranks get their weights in setup: there is nothing to restore before."""
        if self._restores_late is None:
            self._restores_late = any(gather_numbers(int(is_unbuilt(self._module) or is_on_meta(self._module))))
        return self._restores_late

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._is_as_built:
            return super().lightning_module_state_dict()
        self._own_parts("a checkpoint was to be saved")
        self._met.sync_check(range(self.mesh.shape.world_size), "a checkpoint, as by trainer.save_checkpoint")
        self._met.sync_point()
        self.settle()
        return self._checkpoints.model_state()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if self._is_as_built:
            super().save_checkpoint(checkpoint, os.fspath(filepath), storage_options)
            return
        if self._is_in_parts:
            summoned_model = self.summon_full_params(writeback=False)
            checkpoint = full_modules(checkpoint, self._module, summoned_model, is_saved_here=self.is_global_zero)
        if self._resuming is not None and "optimizer_states" in checkpoint:  # it is to go on from
            run = {
                "mesh": asdict(self.mesh.shape),
                "optimizers": [type(optimizer).__name__ for optimizer in self.optimizers],
                "steps": {"seed": self._parts.randomness.seed, "number": self._num_steps},
                "ranks": gather_ranks(self._resuming.state()),
            }
            checkpoint = {**checkpoint, RUN: run}
        self._checkpoints.save_checkpoint(checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpoints.remove_checkpoint(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        return self._checkpoints.load_checkpoint(checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_model(checkpoint, strict=strict or self._is_empty)
        self._is_empty = False

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        lightning_helpers.load_loader_states(self._module.trainer)  # planning has made them before loops were restored
        self._resumes = checkpoint.get(RUN)
        self._precision.take_other_scale(checkpoint)
        self._checkpoints.load_optimizers(checkpoint)
