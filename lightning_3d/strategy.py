"""``ThreeDStrategy``: what Lightning's Trainer calls. ``setup`` shows the order of things; the work is elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint import (
    Folder,
    Gather,
    LateValues,
    SavedState,
    folder_content,
    full_model_state,
    full_optimizer_state,
    gather,
    grouped_optimizer_state,
    hooks_see_saving,
    load_full,
    load_optimizers,
    load_sharded,
    optimizer_state,
    read_full,
    read_sharded,
    replaced_state,
    saved_optimizers,
    shown_parts,
    shown_whole,
    states_apart,
    states_read,
    states_whole,
    whole_optimizer_state,
    write_folder,
    write_full,
)
from lightning_3d.checkpoint.atomic import completed, local_path, remove
from lightning_3d.checkpoint.classes import check_classes, check_num_schedulers, class_names, is_of_lr_finder
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.file_or_folder import file_bytes, is_too_large
from lightning_3d.checkpoint.folder import TIED
from lightning_3d.checkpoint.further_states import has_further
from lightning_3d.checkpoint.last_link import link, link_before_removal
from lightning_3d.checkpoint.match import check_is_lightning
from lightning_3d.checkpoint.own_state import has_no_parameters, state_of, tied_fqns, unwrapped
from lightning_3d.checkpoint.run_state import RUN, gather_ranks, mesh_entry, of_this_rank
from lightning_3d.checkpoint.saves import Saves
from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.config.compile import CompileConfig
from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.config.settings import BatchConfig, ThreeDConfig, unknown_keys_named
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.agreement import on_rank_zero
from lightning_3d.distributed.kept_alike import KeptAlike
from lightning_3d.distributed.mesh import (
    Mesh,
    MeshShape,
    forget_meshes,
    resolve_mesh_shape,
    shared_mesh,
    warn_of_slow_groups,
)
from lightning_3d.distributed.objects import broadcast_object, default_backends
from lightning_3d.errors import CheckpointError, ConfigError, StepError
from lightning_3d.memory.held import bytes_now, held_memory
from lightning_3d.memory.meter import MemoryMeter
from lightning_3d.memory.rank_memory import HeldMemory
from lightning_3d.model.block_runner import SUMMON
from lightning_3d.model.deferred import defer_init, has_deferred
from lightning_3d.pipeline.microbatches import detached_from_inference
from lightning_3d.pipeline.spans import Timeline
from lightning_3d.planning.plan import Plan
from lightning_3d.planning.summary import layout_text
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.ranks.process_exit import end_in_order
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.ranks.restarts import store_of_start
from lightning_3d.ranks.tracebacks import print_frames_of_user
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.dynamo import modules_watched
from lightning_3d.torch_internals.probes import check_what_is_seen
from lightning_3d.torch_internals.process_groups import one_gloo_thread
from lightning_3d.trainer.compiled_code import second_gradients_refused, uncompile, warn_of_compiled
from lightning_3d.trainer.early_copies import copies_of, lay_out_copies
from lightning_3d.trainer.early_optimizers import EarlyParameters
from lightning_3d.trainer.finetuning import finetuning_joined
from lightning_3d.trainer.full_params import full_params, tensors_kept
from lightning_3d.trainer.held_parts import answer_for_parts, copy_in, is_held_as
from lightning_3d.trainer.laid_out import Layout, has_layout, has_some_layout, is_laid_out, lay_out, leave_layouts
from lightning_3d.trainer.last_step import is_last_step
from lightning_3d.trainer.launcher import Launcher
from lightning_3d.trainer.module_names import leave_out_module_names
from lightning_3d.trainer.offload import offloaded_steps
from lightning_3d.trainer.parallel_model import ParallelModel, make_parallel
from lightning_3d.trainer.pending_gradients import gradients_seen
from lightning_3d.trainer.report import RankReport, gather_reports
from lightning_3d.trainer.requirements import (
    NO_FOLDERS,
    check_optimizers,
    refuse_callbacks,
    refuse_offload,
    refuse_places,
    refuse_serving,
    refuse_unplanned,
    refuse_unsupported,
    saves_optimizers,
)
from lightning_3d.trainer.resuming import Resuming
from lightning_3d.trainer.run_control import RunControl
from lightning_3d.trainer.same_settings import check_same_optimizers, check_same_settings, check_same_training
from lightning_3d.trainer.scopes import dataclasses_registered, metrics_joined, parts_averaged, schedulers_skipping
from lightning_3d.trainer.synced_norms import check_synced, sync_norms
from lightning_3d.trainer.user_clipping import clipping_joined
from lightning_3d.trainer.user_collectives import UserCollectives
from lightning_3d.trainer.whole_modules import modules_whole
from lightning_3d.trainer.world_size import warn_of_copies
from lightning_3d.waits import Waits
from lightning_3d.zero.local_steps import LocalSteps
from lightning_3d.zero.plain_parameters import PlainParameters


class ThreeDStrategy(ParallelStrategy):
    """Trains any LightningModule in data (ZeRO) x pipeline x tensor parallel; ``Trainer(strategy="3d")``.

    Args:
        pipeline_parallel_size: Number of pipeline stages.
        data_parallel_size: Number of model replicas; ``"auto"`` fills the world size.
        tensor_parallel_size: Ranks that share each block's weights.
        context_parallel_size: Ranks that share each sequence; only 1 so far.
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

    Raises:
        ConfigError: a key or value that is not allowed.
    """

    @unknown_keys_named
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
    ) -> None:
        super().__init__()
        check_what_is_seen()
        self.config = ThreeDConfig.from_mapping(
            {
                "pipeline_parallel_size": pipeline_parallel_size,
                "data_parallel_size": data_parallel_size,
                "tensor_parallel_size": tensor_parallel_size,
                "context_parallel_size": context_parallel_size,
                "zero": zero,
                "pipeline": pipeline,
                "tensor": tensor,
                "activations": activations,
                "compile": compile,
                "batch": batch,
                "precision": precision,
                "checkpoint": checkpoint,
                "save_distributed_checkpoint": save_distributed_checkpoint,
            }
        )
        self.num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout, self._heartbeat_timeout = timeout, heartbeat_timeout
        self._mesh: Mesh | None = None
        self._control: RunControl | None = None  # while a Trainer runs on several ranks
        self._rendezvous: Rendezvous | None = None
        self._parallel: ParallelModel | None = None
        self._meter: MemoryMeter | None = None  # where a budget is planned
        self._layout: Layout | None = None  # of the model that is parallel
        self._told: Layout | None = None  # the one that was told of
        self._dataclasses: list[type[Any]] = []  # pytrees while a Trainer runs
        self._accumulating = False
        self._is_deferring = False  # inside tensor_init_context, which may nest
        self._patches = ExitStack()  # undone in teardown
        self._optimizer_hooks = ExitStack()  # undone for other optimizers, and in teardown
        self._trained_with: list[Optimizer] = []  # that have them now
        self._unsaved: list[Optimizer] = []  # that did not step yet, so that nobody knows whether they can be saved
        self._saved_state: dict[str, Any] = {}  # of the model, as the Trainer got it last for a checkpoint
        self._is_large = False  # a checkpoint, for one file; known once the optimizers are made
        self._is_late = False  # it got parts for a file, which becomes whole while it is written
        self._restores: Folder | None = None  # the folder that is being restored
        self._restores_late: bool | None = None  # after setup; known once the model is built
        self._resuming: Resuming | None = None  # in a fit
        self._resumes: Mapping[str, Any] | None = None  # the state of the run that this one goes on with, until it does
        self._is_stepping = False  # inside of a step method of the user's
        self._saves = Saves(self.config.checkpoint, timeout)
        self._num_steps = 0  # steps of any kind that ran, for their random numbers
        self._is_in_training = False

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the model, and none of what belongs to the processes and their run."""
        state: dict[str, Any] = super().__getstate__()
        for name in ("_local_steps", "_saves"):
            state.pop(name, None)
        of_run = dict.fromkeys(
            ("_mesh", "_control", "_rendezvous", "_parallel", "_layout", "_told", "_restores", "_resuming", "_resumes")
        )
        return {
            **state,
            **of_run,
            "_is_in_training": False,
            "_trained_with": [],
            "_unsaved": [],
            "_patches": ExitStack(),
            "_optimizer_hooks": ExitStack(),
        }

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._saves = Saves(self.config.checkpoint, self._timeout)
        if self._launcher is not None:
            self._configure_launcher()

    @classmethod
    def from_config(
        cls, config: str | os.PathLike[str] | Mapping[str, Any], overrides: Sequence[str] = ()
    ) -> ThreeDStrategy:
        """Make a strategy from a YAML file or a mapping (a dict or an OmegaConf node).

        Args:
            config: Path of a YAML file with the keys of ``ThreeDConfig``, or such a mapping.
            overrides: Assignments such as ``"zero.stage=2"`` to the file's values, applied in order.

        Raises:
            ConfigError: an unknown key or a value that is not allowed.
        """
        if isinstance(config, (str, os.PathLike)):
            read = ThreeDConfig.from_file(config, overrides)
        elif overrides:
            raise ConfigError(f"overrides {list(overrides)} apply to a file; change the mapping itself instead")
        else:
            read = ThreeDConfig.from_mapping(config)
        return cls(**{field.name: getattr(read, field.name) for field in fields(read)})

    # ---- processes and the mesh

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        warn_of_copies(self._mesh, "num_processes")
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    @override
    def world_size(self) -> int:
        """Number of all ranks, as in every strategy."""
        warn_of_copies(self._mesh, "world_size")
        return super().world_size

    @property
    def process_group_backend(self) -> str | None:
        """The backend of the default process group."""
        return self._process_group_backend

    @property
    def mesh(self) -> Mesh:
        """This rank's place and its process groups; there once the processes have started."""
        assert self._mesh is not None, "the mesh is made in setup_environment"
        return self._mesh

    @property
    def _met(self) -> Rendezvous:
        assert self._rendezvous is not None, "the rendezvous is opened in setup_environment"
        return self._rendezvous

    @property
    def plan(self) -> Plan:
        """The plan of what lies where; there once the Trainer has set the strategy up. Printable by rich."""
        return self._parts.present_plan

    @property
    def _parts(self) -> ParallelModel:
        assert self._parallel is not None, "the model is made parallel in setup"
        return self._parallel

    def _own_parts(self, what: str) -> ParallelModel:
        if self._layout is None:
            raise StepError(
                f"No run of this Trainer has set up {type(self._module).__name__}, and {what}. Call fit, validate, test"
                " or predict before."
            )
        if not has_layout(self._module, self._layout):
            raise StepError(
                f"{type(self._module).__name__} has got the layout of another Trainer since this one ran it, and {what}"
                " by this one. Do it by the Trainer that ran it last."
            )
        return self._parts

    @property
    def _is_as_built(self) -> bool:
        """Whether no Trainer has run the model, so that every rank has the whole of it."""
        return self._layout is None and not has_some_layout(self._module) and not has_deferred(self._module)

    @property
    def _is_in_parts(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self.config.zero.stage == 3 or self.mesh.shape.is_model_parallel

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

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
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        resolve_mesh_shape(self.config, self.num_nodes * self.num_processes)  # raises before any process is started
        refuse_offload(self.config.activations, self.root_device)
        # Starts none under torchrun or SLURM, but checks that they started as many as the Trainer expects.
        self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes, self._fail)

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._restores_late = self._resuming = self._resumes = None
        shape = self._shape
        if shape.dp > 1:  # as DDP does; a single replica goes on with the random numbers of one process
            reset_seed()
        self.set_world_ranks()
        self._process_group_backend = self._process_group_backend or default_backends(self.root_device)
        assert self.cluster_environment is not None
        device_id = None if self.root_device.type == "cpu" else self.root_device
        if not dist.is_initialized():
            store = store_of_start(shape.world_size, self._timeout)
            meeting: dict[str, Any] = {} if store is None else {"store": store}
            with one_gloo_thread():
                lightning_helpers.connect(
                    self.cluster_environment,
                    self._process_group_backend,
                    timeout=self._timeout,
                    device_id=device_id,
                    **meeting,
                )
        end_in_order()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous.open(self._timeout.total_seconds())
        if shape.world_size > 1:
            self._control = self._open_control(shape)
            check_same_settings(self._module.trainer, self.config)
        warn_of_slow_groups(shape, self.num_processes)
        zero = self.config.zero
        self._mesh = shared_mesh(
            shape,
            device_type=self.root_device.type,
            zero_stage=zero.stage,
            shard_size=zero.shard_size,
            timeout=self._timeout,
        )
        if not is_laid_out(self._module, self._layout) or self._lacks_budget():  # by this strategy, and as it is now
            copies = copies_of(self._module, lightning_helpers.callbacks_of(self._module.trainer))
            leave_layouts(self._module, copies)
            self._parallel = None

    def _lacks_budget(self) -> bool:
        """Whether a fit is to begin within a budget, but the model was laid out for a run without a training step."""
        is_fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        plans = is_fitting and self.config.activations.plans_memory
        return plans and self._parallel is not None and self._parallel.budget is None

    def _open_control(self, shape: MeshShape) -> RunControl:
        assert isinstance(self._launcher, Launcher)
        seconds = self._heartbeat_timeout.total_seconds()
        control = RunControl(self._module.trainer, shape, self._launcher, timeout=seconds)
        control.open()
        return control

    def _fail(self, error: BaseException) -> Exception | None:
        """Another exception to raise in place of one that ends a run, if any."""
        self._saves.finish_alone()
        forget_meshes()
        if self._control is not None:
            return self._control.fail(error, self._patches)
        print_frames_of_user(error)
        return None

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank would take part in a collective."""
        return not dist.is_initialized() or (self._control is not None and self._control.has_failed)

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who we are; the accelerator connector calls it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # a function attribute

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to give dataloaders a distributed sampler: one replica keeps the user's own order."""
        return self._shape.dp > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Also before a run, for samplers that users make."""
        return {"num_replicas": self._shape.dp, "rank": self._shape.coordinate(self.global_rank).dp}

    @property
    def _shape(self) -> MeshShape:
        return resolve_mesh_shape(self.config, self.num_nodes * self.num_processes)

    # ---- the order of things

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """For ``configure_model`` and ``trainer.init_module()``: with a pipeline, what is built inside gets its weights
        when it is set up, so that no rank ever holds those of other stages.
        """
        with super().tensor_init_context(empty_init), ExitStack() as stack:
            if self.config.pipeline_parallel_size > 1 and not self._is_deferring:
                self._is_deferring = True
                stack.callback(setattr, self, "_is_deferring", False)
                stack.enter_context(defer_init(self.root_device))
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self._patches.enter_context(dataclasses_registered(self._dataclasses))
        self._patches.enter_context(metrics_joined(self.mesh.group("dp")))
        self._patches.enter_context(parts_averaged())
        if self.mesh.shape.dp == 1:
            self._patches.enter_context(lightning_helpers.logging_as_alone())
        if self.mesh.shape.is_model_parallel:
            self._patches.enter_context(torch.compiler.set_stance("force_eager"))
        if self.config.compile.enabled:
            self._patches.enter_context(modules_watched())
        refuse_callbacks(trainer, self.mesh)
        if trainer.state.fn == TrainerFn.FITTING:
            refuse_unplanned(self._module, self.config.activations)
            refuse_serving(trainer, self.mesh, self.config.zero)
            reads_again = self.config.batch.resume == "exact"
            self._resuming = Resuming(trainer, self._module, self.root_device, reads_again=reads_again)
            self._patches.enter_context(self._resuming.installed())
            self._patches.enter_context(lightning_helpers.last_linked(trainer, self._link, self._link_before_removal))
        if self.config.save_distributed_checkpoint is True and lightning_helpers.has_own_io(self):
            raise ConfigError(
                f"save_distributed_checkpoint=True writes folders by torch.distributed.checkpoint, not through"
                f" {type(self.checkpoint_io).__name__}: set it to False, or leave it out, for a file through that."
            )
        if self.config.checkpoint.async_save and lightning_helpers.has_own_io(self):
            raise ConfigError(
                "checkpoint.async_save=True writes checkpoints in the background, but a CheckpointIO of yours,"
                f" {type(self.checkpoint_io).__name__}, is to write them: leave out one of them."
            )
        check_same_training(self._module)
        self.config.precision.check_for(self._precision.precision)
        syncing = lightning_helpers.layer_sync_of(self)
        if trainer.state.fn == TrainerFn.FITTING:
            check_synced(self._module, syncing, self.mesh.shape, self.root_device.type)
        if self._parallel is None:
            self._early = EarlyParameters(self._module)
            self._precision.convert(self._module, self.config.precision, self.root_device)
            refuse_unsupported(self._module, self.mesh, self.config.zero, self.config.pipeline.mode)
            sync_norms(self._module, syncing, self.mesh.shape)
            if self.mesh.shape.is_model_parallel:
                warn_of_compiled(self._module)
            if self.mesh.shape.is_model_parallel or self.config.activations.plans_memory:
                leave_out_module_names(trainer)
            wait = Waits(trainer, lambda: self._is_stepping)
            with wait(f"Making {type(self._module).__name__} parallel"):
                self._parallel = make_parallel(
                    trainer=trainer,
                    module=self._module,
                    config=self.config,
                    mesh=self.mesh,
                    precision=self._precision,
                    device=self.root_device,
                    wait=wait,
                    rendezvous=self._met,
                )
            answer_for_parts(self._module, self._met)
            copies = copies_of(self._module, lightning_helpers.callbacks_of(trainer)) if self._is_in_parts else []
            if self._is_in_parts:
                lay_out_copies(copies, self._module, self.root_device, self._met)
            self._layout = Layout(self._module, self._parallel.plan, self.mesh, self.root_device, copies)
            lay_out(self._layout)
        self._patches.enter_context(self._parallel.router.installed())
        if self._is_in_parts:
            self._patches.enter_context(clipping_joined(self._module, self._parallel.zero, self._norm_of))
            self._patches.enter_context(finetuning_joined(self.mesh.group("pp")))
        if trainer.state.fn == TrainerFn.FITTING:
            lightning_helpers.reset_optimizers(self)
            self.setup_optimizers(trainer)
            self._tell_layout(trainer)
        self._choose_checkpoints(trainer)
        self.setup_precision_plugin()
        if self._control is not None and trainer.state.fn == TrainerFn.FITTING:
            self._control.heed_signals_together()

    def _tell_layout(self, trainer: Trainer) -> None:
        """Say once what layout is running, where the Trainer shows a summary of the model; every rank calls it."""
        shows = any(isinstance(callback, ModelSummary) for callback in lightning_helpers.callbacks_of(trainer))
        if self.mesh.shape.world_size == 1 or self._told is self._layout or not self.broadcast(shows):
            return
        self._told = self._layout
        parts = self._parts
        own = held_memory(self._module, parts.zero, self.optimizers, self.config, self.mesh, self.root_device, None)
        everyone = [own] * self.mesh.shape.world_size
        dist.all_gather_object(everyone, own)
        rank_zero_info(layout_text(parts.plan, HeldMemory.most(everyone), parts.zero.num_sharing))

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
        if self._trained_with and self._trained_with != optimizers:
            self._leave_optimizers()
            self._train_with(optimizers, self._module.trainer)

    def _leave_optimizers(self) -> None:
        """Let other optimizers take their place; gradients that have accumulated are whole, and theirs."""
        self._parts.zero.shows_gradients = True
        self._parts.zero.show_gradients()
        self._optimizer_hooks.close()

    def _train_with(self, optimizers: list[Optimizer], trainer: Trainer) -> None:
        zero, shows = self._parts.zero, self.config.zero.show_gradients
        zero.shows_gradients = gradients_seen(trainer, self._module) if shows == "auto" else shows
        self._trained_with, self._unsaved = list(optimizers), list(optimizers)
        self._optimizer_hooks.callback(self._trained_with.clear)
        self._early.replace(optimizers, self._module)
        check_same_optimizers(optimizers)
        kinds = check_optimizers(optimizers, self._module, self.mesh, self.config.zero, self.root_device)
        zero.divide(kinds)
        self._parallel = self._parts.with_optimizers(kinds, self._module, self.config.zero)
        self._optimizer_hooks.callback(zero.release)
        self._precision.divide(kinds, self._module, self.config.precision)
        masters = self._precision.master_weights()
        offload = offloaded_steps(self.config.zero, zero, kinds, self.root_device, masters)
        check = self._precision.refuse_unchecked
        alike = KeptAlike(self.mesh.group("tp")) if self.mesh.shape.tp > 1 else None
        self._local_steps = LocalSteps(zero, check=check, offload=offload, masters=masters, alike=alike)
        self._optimizer_hooks.enter_context(self._local_steps.hooked(optimizers))
        self._parallel = self._parts.within_budget(kinds, self._module, self.config, self.mesh, self.root_device)
        self._meter = None
        if self._parallel.budget is not None:
            self._meter = MemoryMeter(
                self.root_device,
                trainer.accumulate_grad_batches,
                lambda: bytes_now(self._module, self.optimizers),
                self._show_memory,
            )
            self._optimizer_hooks.callback(self._meter.stop)
        if self._precision.scales_losses:
            self._optimizer_hooks.enter_context(schedulers_skipping(self._module, self._precision.skips))

    def profile_memory(self) -> None:
        """Measure the peak of the second step, shown in `plan`, by torch's profiler on devices whose allocator does not
        count; to be called before the first step. No other profiler of torch may run meanwhile.

        Raises:
            StepError: no budget is set, so nothing is predicted.
        """
        if self._meter is None:
            raise StepError("The memory of steps is predicted and measured with a budget: set activations.budget")
        self._meter.profiles = True

    def _show_memory(self, measured: int | None) -> None:
        """Put the measured peaks of all ranks into the plan; every rank calls it."""
        everyone: list[Any] = [None] * self.mesh.shape.world_size
        dist.all_gather_object(everyone, (self.mesh.pp_rank, measured))
        self._parallel = replace(self._parts, plan=self._parts.plan.with_measured(everyone))

    # ---- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._met.pass_point()
        if self._control is not None:
            self._control.begin_batch()
        self._local_steps.end_failed()
        self._num_steps += 1
        if self._meter is not None:
            self._meter.begin_batch()
        self._parts.zero.begin_forward()
        self._parts.buffers.before_step(are_due_after=not self._accumulating)
        batch, *rest = (*args, *kwargs.values())
        batch = self._parts.guard(batch)
        if self._parts.budget is not None:
            self._parts.budget.batches.look_at(batch)
        with self._stepping(), self._precision.train_step_context():
            return self._parts.runner.train(batch, rest, number=self._num_steps, accumulating=self._accumulating)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.val_step_context():
            return self._evaluate("validation_step", *args, *kwargs.values())

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.test_step_context():
            return self._evaluate("test_step", *args, *kwargs.values())

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._precision.predict_step_context():
            return self._evaluate("predict_step", *args, *kwargs.values())

    def _evaluate(self, name: str, batch: Any, *rest: Any) -> Any:
        self._met.pass_point()
        self._num_steps += 1
        if self._meter is not None:
            self._meter.end()
        self._parts.zero.begin_forward()
        self._parts.buffers.before_step(are_due_after=False)
        # DTensors do not survive inference mode.
        with self._stepping(), torch.inference_mode(False), torch.no_grad():
            batch = self._parts.guard(detached_from_inference(batch))
            return self._parts.runner.evaluate(name, batch, rest, number=self._num_steps)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_stepping = True
        try:
            with self._met.agreed():
                yield
        finally:
            self._is_stepping = False
        num, seconds = self._parts.compiling.take()
        if num:
            rank_zero_info(f"Compiling blocks took {seconds:.1f} s, for {num} kinds of calls.")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        refused = second_gradients_refused() if self.config.compile.enabled else nullcontext()
        with self._parts.runner.around_backward(closure_loss, accumulating=self._accumulating), refused:
            loss = super().backward(closure_loss, optimizer, *args, **kwargs)
        if not self._module.automatic_optimization:
            self._precision.after_manual_backward()
        if not self._accumulating:
            self._parts.zero.settle()
        return loss

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        try:
            output = super().optimizer_step(optimizer, closure, model, **kwargs)
        except Exception as error:
            self._local_steps.fail(optimizer, error)
            raise
        finally:
            self._local_steps.leave(optimizer)
        self._parts.runner.after_optimizer_step()
        if optimizer in self._unsaved and saves_optimizers(self._module.trainer):
            self._unsaved.remove(optimizer)
            with failing_alike(f"prepare to save {type(optimizer).__name__}, which checkpoints of this run hold"):
                optimizer_state(self._module, optimizer, self._parts.zero.shards)
        return output

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients as if they lay in one process; 0-d, equal on all ranks. Every rank calls it.

        Raises:
            StepError: a rank calls it alone.
        """
        self._met.meet(range(self.mesh.shape.world_size), "gradient_norm")
        return self._parts.gradients.norm(norm_type=norm_type)

    def _norm_of(self, parameters: Iterable[nn.Parameter], norm_type: float) -> Tensor:
        self._met.meet(range(self.mesh.shape.world_size), "a norm of gradients, as clip_grad_norm_ takes it")
        return self._parts.gradients.norm(parameters, norm_type)

    def start_timeline(self) -> None:
        """Measure the pipeline steps that follow. Every rank calls it.

        Raises:
            StepError: there is no pipeline.
        """
        self._parts.runner.start_timeline()

    def finish_timeline(self) -> Timeline:
        """The timeline of this rank's pipeline since ``start_timeline``. Every rank calls it."""
        return self._parts.runner.finish_timeline()

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
        root: nn.Module = self._module
        module = root if module is None else module
        parts.zero.settle()
        if all(module is not inner for inner in root.modules()):
            if (copied := copy_in(module, root)) is None:
                raise StepError(
                    f"{type(module).__name__} is not the {type(root).__name__} that this strategy trains, nor a module"
                    " in it, nor a copy of it."
                )
            if not is_held_as(copied, root):
                raise StepError(
                    f"This copy of {type(root).__name__} has the parts that another Trainer gave the model, which has"
                    f" another layout now. Copy the model {SUMMON}."
                )
            root = copied
        is_whole = type(parts.zero) is PlainParameters and not self.mesh.shape.is_model_parallel
        if not is_whole:
            self._met.meet(range(self.mesh.shape.world_size), "summon_full_params")
        if is_whole and writeback:
            summoned = tensors_kept(root, module)
        else:
            summoned = full_params(root, module, parts.plan, self.mesh, self.root_device, writeback=writeback)
        with summoned:
            yield

    def report(self) -> list[RankReport]:
        """The share of the model that each rank holds, by rank. Every rank calls it; ``report_table`` shows it."""
        offloads = self.config.zero.offload_optimizer != "none"
        return gather_reports(self._module, self.optimizers, self.mesh, self.root_device, offloads=offloads)

    @override
    def on_train_start(self) -> None:
        self._is_in_training = True
        resumes, self._resumes = self._resumes, None
        if resumes is None:
            return
        self._parts.randomness.seed, self._num_steps = resumes["steps"]["seed"], resumes["steps"]["number"]
        assert self._resuming is not None
        self._resuming.load_state(of_this_rank(resumes, self.mesh))

    @override
    def on_validation_end(self) -> None:
        self._parts.zero.settle()

    @override
    def on_train_end(self) -> None:
        self._met.pass_point()
        if self._control is not None:
            self._control.heed_signals_together()
        self._is_in_training = False  # checkpoints of hooks that follow are not written in the background
        self._saves.wait()

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._saves.finish_alone()  # of callbacks that save when there is one

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

    # ---- collectives that Lightning and users ask for

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._is_alone:
            return
        self._collectives.refuse_in_stages("barrier")
        self._met.pass_point()
        device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=device_ids)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone:
            return obj
        self._collectives.refuse_in_stages("broadcast")
        self._met.pass_point()
        return broadcast_object(obj, self.root_device, src=src)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._is_alone:
            return tensor
        self._pass_collective(group)
        return self._collectives.reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        self._pass_collective(group)
        return self._collectives.all_gather(tensor, group, sync_grads=sync_grads)

    def _pass_collective(self, group: Any) -> None:
        if group is None:  # else not all ranks need come here
            self._met.pass_point()

    @property
    def _collectives(self) -> UserCollectives:
        return UserCollectives(self.mesh)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks."""
        if self._is_alone:
            return decision
        self._met.pass_point()
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)

    # ---- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Before it, as with DDP, unless the model gets its weights in setup: there is nothing to restore before."""
        if self._restores_late is None:
            self._restores_late = has_deferred(self._module)
        return self._restores_late

    @property
    def _saves_folders(self) -> bool:
        """Whether checkpoints become folders, which torch.distributed.checkpoint writes."""
        setting = self.config.save_distributed_checkpoint
        return self._is_large if setting == "auto" else setting

    def _choose_checkpoints(self, trainer: Trainer) -> None:
        """Choose files or folders for this run, alike on all ranks."""
        if self.config.save_distributed_checkpoint == "auto" and not lightning_helpers.has_own_io(self):
            num_bytes = on_rank_zero(lambda: file_bytes(self._module, self.optimizers), self.root_device)
            self._is_large = is_too_large(num_bytes, self.config.checkpoint.max_file_size)
        refuse_places(trainer, as_folders=self._saves_folders)
        if self._saves_folders and (names := lightning_helpers.uploading_loggers(trainer)):
            rank_zero_warn(
                f"{', '.join(names)} uploads checkpoint files (log_model), but checkpoints of this run are folders,"
                " which it leaves out: set save_distributed_checkpoint=False for files."
            )

    @property
    def _gathers_late(self) -> bool:
        """Whether a file becomes whole while it is written, as nobody wants it whole before."""
        is_seen = lightning_helpers.has_own_io(self) or hooks_see_saving(self._module.trainer, self._module)
        return not (self._saves_folders or self.config.checkpoint.async_save or is_seen)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """All names that one process saves: with this rank's parts for a folder, or a file that is written a tensor at
        a time; for another file with the whole on rank 0, or on all ranks where hooks of the user's may look at it.
        """
        if self._is_as_built:
            return super().lightning_module_state_dict()
        parts = self._own_parts("a checkpoint was to be saved")
        self._met.meet(range(self.mesh.shape.world_size), "a checkpoint, as by trainer.save_checkpoint")
        self._met.pass_point()
        parts.zero.settle()
        self._is_late = self._gathers_late
        if self._saves_folders or self._is_late:
            self._saved_state = shown_parts(self._module)
        else:
            whole = full_model_state(self._module, self.mesh.axis("pp"))
            if hooks_see_saving(self._module.trainer, self._module):
                whole = {fqn: self.broadcast(whole.get(fqn)) for fqn in self.broadcast(list(whole))}
            self._saved_state = shown_whole(self._module, whole)
        return self._saved_state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part, or on rank 0 the whole for a file that is not written a tensor at a time."""
        shards = self._parts.zero.shards
        if self._is_late:
            parts: dict[str, Any] = {}
            with failing_alike("gather the optimizer's state"):
                parts = grouped_optimizer_state(self._module, optimizer, shards)
            return parts
        if self._saves_folders or has_no_parameters(optimizer):
            return optimizer_state(self._module, optimizer, shards)
        whole = full_optimizer_state(
            self._module, optimizer, self.mesh.axis("pp"), shards, self.mesh.sliced("dp_shard")
        )
        return whole or {"state": {}, "param_groups": unwrapped(optimizer).state_dict()["param_groups"]}

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if self._is_as_built:
            super().save_checkpoint(checkpoint, os.fspath(filepath), storage_options)
            return
        filepath = self._lasting(self.broadcast(filepath))
        trainer = self._module.trainer
        is_late, self._is_late = self._is_late, False
        is_running = self._is_in_training and trainer.state.status == TrainerStatus.RUNNING
        if not self._saves.begins(filepath, may_skip=is_running and not is_last_step(trainer)):
            return
        if self._is_in_parts:
            summoned = self.summon_full_params(writeback=False)
            checkpoint = modules_whole(checkpoint, self._module, summoned, is_saved_here=self.is_global_zero)
        if self._resuming is not None and "optimizer_states" in checkpoint:  # it is to go on from
            checkpoint = {**checkpoint, RUN: self._run_state(self._resuming)}
        own, self._saved_state = self._saved_state, {}
        if not self._saves_folders:
            own_path = self._own_path(filepath) if storage_options is None else None
            late = LateValues() if is_late and own_path is not None else None
            gathered = gather if late is None else late.gathered
            checkpoint = self._made_whole(checkpoint, own, gathered) if is_late else checkpoint
            checkpoint = states_whole(checkpoint, self._module, own, self.mesh.axis("pp"), gathered)
            write = partial(self._write_file, filepath, own_path, storage_options, late)
            self._saves.save(filepath, checkpoint, write, is_running)
            return
        if (path := local_path(filepath)) is None:
            raise CheckpointError(f"{filepath} {NO_FOLDERS}.")
        if storage_options is not None:
            raise CheckpointError(
                "storage_options are for a CheckpointIO, but a checkpoint folder is written without one: give the"
                " Trainer one (plugins=[...]), which writes files."
            )
        left, further = states_apart(checkpoint, self._module, own)
        further[TIED] = tied_fqns(self._module)
        content = folder_content(left, self.mesh.axis("pp"), further)
        self._saves.save(filepath, content, partial(write_folder, path), is_running)

    def _made_whole(self, checkpoint: dict[str, Any], own: dict[str, Any], gathered: Gather) -> dict[str, Any]:
        """A checkpoint with the whole states of the model and the optimizers in place of this rank's parts."""
        pp = self.mesh.axis("pp")
        checkpoint = replaced_state(checkpoint, own, full_model_state(self._module, pp, gathered))
        if (states := checkpoint.get("optimizer_states")) is not None:
            dp = self.mesh.sliced("dp_shard")
            checkpoint["optimizer_states"] = [
                state
                if has_no_parameters(optimizer)
                else whole_optimizer_state(state, self._module, optimizer, pp, dp, gathered)
                for state, optimizer in zip(states, self.optimizers, strict=True)
            ]
        return checkpoint

    def _write_file(
        self,
        filepath: str | os.PathLike[str],
        own_path: Path | None,
        storage_options: Any,
        late: LateValues | None,
        checkpoint: dict[str, Any],
        group: dist.ProcessGroup | None,
    ) -> None:
        with failing_alike(f"write the checkpoint {filepath}", group):
            if own_path is not None and late is not None:
                late.write(partial(write_full, checkpoint, own_path))
            elif not self.is_global_zero:
                pass
            elif own_path is not None:
                write_full(checkpoint, own_path)
            else:
                super().save_checkpoint(checkpoint, str(filepath), storage_options)

    def _run_state(self, resuming: Resuming) -> dict[str, Any]:
        """The entry by which a run goes on exactly where this one is; with all ranks on rank 0."""
        return {
            "mesh": mesh_entry(self.mesh.shape),
            "steps": {"seed": self._parts.randomness.seed, "number": self._num_steps},
            "classes": {
                "optimizers": [class_names(unwrapped(optimizer)) for optimizer in self.optimizers],
                "schedulers": [class_names(config.scheduler) for config in self.lr_scheduler_configs],
            },
            "ranks": gather_ranks(resuming.state()),
        }

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        filepath = self._lasting(filepath)
        if self.is_global_zero:
            self._saves.once_saved(filepath, partial(self._remove, filepath))

    def _remove(self, filepath: str | Path) -> None:
        if (path := self._own_path(filepath)) is not None and os.path.lexists(path):
            remove(path)
        else:
            super().remove_checkpoint(filepath)

    def _lasting(self, filepath: str | os.PathLike[str]) -> str:
        """A path that means the same in the background, wherever the process goes meanwhile."""
        path = local_path(filepath) if self.config.checkpoint.async_save else None
        return os.fspath(filepath if path is None else path.absolute())

    def _own_path(self, filepath: str | os.PathLike[str]) -> Path | None:
        """Where this strategy writes a checkpoint; None where a ``CheckpointIO`` does: the user's, or Lightning's to
        remote file systems.
        """
        return None if lightning_helpers.has_own_io(self) else local_path(filepath)

    def _link(self, checkpoint: str, path: str) -> None:
        """Let a path be a link to a checkpoint, once that has been written."""
        is_awaited = lightning_helpers.has_own_io(self)  # its own may still write
        self._change_link(path, partial(link, Path(checkpoint), Path(path), may_come=is_awaited))

    def _link_before_removal(self, gone: str, newest: str, path: str) -> None:
        self._change_link(path, partial(link_before_removal, Path(gone), Path(newest), Path(path)))

    def _change_link(self, path: str, act: Callable[[], None]) -> None:
        if self._is_alone:  # and nothing was saved
            return
        with failing_alike(f"change the link {path}"):
            if self.is_global_zero:
                self._saves.once_saved(path, act)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint of any layout; the model and its optimizers are filled when Lightning has given the user's
        ``on_load_checkpoint`` its turn.
        """
        checkpoint_path = self.broadcast(checkpoint_path)
        self._saves.wait()
        path = local_path(checkpoint_path)
        path = None if path is None else completed(path)
        weights_only = self._asked_weights_only if weights_only is None else weights_only
        self._restores = None
        if path is not None and path.is_dir():
            self._restores, rest = read_sharded(path, weights_only=weights_only)
            checkpoint = states_read(rest, self._restores, self._module)
            checkpoint["state_dict"] = SavedState(self._restores, ("state_dict",))
            if "lr_schedulers" in rest:  # they are saved with the optimizers
                checkpoint["optimizer_states"] = saved_optimizers(self._restores)
        elif lightning_helpers.has_own_io(self):
            checkpoint = super().load_checkpoint(str(checkpoint_path), weights_only=weights_only)
        elif path is None:  # Lightning would unpickle anything that comes by http
            checkpoint = super().load_checkpoint(str(checkpoint_path), weights_only=weights_only is not False)
        else:
            checkpoint = read_full(path, weights_only=weights_only)
        check_is_lightning(checkpoint, checkpoint_path)
        lightning_helpers.leave_schedulers_to_averaging(self._module.trainer, checkpoint)
        return checkpoint

    @property
    def _asked_weights_only(self) -> bool | None:
        """The argument of ``fit(..., weights_only=...)``, which Lightning does not hand on to this strategy."""
        launcher = self.launcher
        assert isinstance(launcher, lightning_helpers.ScriptLauncher)
        return launcher.weights_only

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        folder = self._restores
        if folder is None:
            load_full(checkpoint["state_dict"], self._module, strict=strict)
            return
        state = checkpoint["state_dict"]
        unread, changed = state.split() if isinstance(state, SavedState) else ((), state)
        load_sharded(folder, self._module, strict=strict, unread=unread, changed=changed)
        if has_further(folder):  # callbacks that average weights go on from what was loaded
            assert isinstance(checkpoint, dict)
            checkpoint["state_dict"] = state_of(self._module)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        lightning_helpers.load_loader_states(self._module.trainer)  # planning has made them before loops were restored
        self._resumes = checkpoint.get(RUN)
        self._check_classes(checkpoint)
        self._precision.tell_other_scales(checkpoint)
        if states := checkpoint["optimizer_states"]:  # hooks empty it for optimizers that start anew
            shards, strict = self._parts.zero.shards, self._module.strict_loading
            load_optimizers(states, self._module, self.optimizers, strict=strict, shards=shards)

    def _check_classes(self, checkpoint: Mapping[str, Any]) -> None:
        names = checkpoint.get(RUN, {}).get("classes")
        states, of_schedulers = checkpoint["optimizer_states"], checkpoint.get("lr_schedulers", [])
        configs = self.lr_scheduler_configs
        if any(is_of_lr_finder(config.scheduler) for config in configs):  # whose run failed, and is undone
            return
        if not lightning_helpers.averages_stochastically(self._module.trainer):  # which takes their place
            check_num_schedulers(len(of_schedulers), len(configs))
        check_classes(
            names,
            list(zip(self.optimizers, states, strict=False)),
            [(config.scheduler, state) for config, state in zip(configs, of_schedulers, strict=False)],
            strict=self._module.strict_loading,
        )

    # ---- the model's place

    @override
    def model_to_device(self) -> None:
        """Nothing: every rank moves what it holds when the model is made parallel."""

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self._optimizer_hooks.close()
        self._patches.close()
        if self._control is not None:
            self._control.close()
            self._control = None
        self._is_in_training = False
        self._saves.close()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
