"""``ThreeDStrategy``: what Lightning's Trainer calls, and what users do; each goes to the present `Run`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.config.activations import ActivationsConfig
from lightning_3d.config.checkpoint import CheckpointConfig
from lightning_3d.config.compile import CompileConfig
from lightning_3d.config.configured import Configured
from lightning_3d.config.context import ContextConfig
from lightning_3d.config.deepspeed_optimizers import optimizers_given
from lightning_3d.config.pipeline import PipelineConfig
from lightning_3d.config.precision import PrecisionConfig
from lightning_3d.config.settings import BatchConfig, ThreeDConfig
from lightning_3d.config.tensor import TensorConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.mesh import Mesh, MeshShape, refuse_unbuilt, resolve_mesh_shape
from lightning_3d.errors import StepError
from lightning_3d.model.unbuilt import building
from lightning_3d.planning.layouts import Choice
from lightning_3d.planning.plan import Plan
from lightning_3d.precision.plugin import ThreeDPrecision
from lightning_3d.run import checkpoints
from lightning_3d.run.decide.compiled_code import uncompile
from lightning_3d.run.decide.requirements import refuse_offload
from lightning_3d.run.ranks import ProcessSettings, number_of_processes, set_world_ranks
from lightning_3d.run.report import RankReport, gather_reports
from lightning_3d.run.run import Run
from lightning_3d.run.step import user_collectives
from lightning_3d.torch_internals.launchers import ForkLauncher, ScriptLauncher, is_forked


class ThreeDStrategy(Configured, ParallelStrategy):
    """Trains any LightningModule in data (ZeRO) x pipeline x tensor parallel; ``Trainer(strategy="3d")``.

    Args:
        pipeline_parallel_size: Number of pipeline stages.
        data_parallel_size: Number of model replicas; ``"auto"`` fills the world size.
        tensor_parallel_size: Ranks that share each block's weights.
        context_parallel_size: Ranks that share each sequence.
        samples_per_step: Samples of all replicas in an optimizer step, whose number of batches follows.
        zero: A ``ZeroConfig`` or a dict of its keys.
        pipeline: A ``PipelineConfig`` or a dict of its keys.
        tensor: A ``TensorConfig`` or a dict of its keys.
        context: A ``ContextConfig`` or a dict of its keys.
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
        samples_per_step: int | None = None,
        zero: ZeroConfig | dict[str, Any] | None = None,
        pipeline: PipelineConfig | dict[str, Any] | None = None,
        tensor: TensorConfig | dict[str, Any] | None = None,
        context: ContextConfig | dict[str, Any] | None = None,
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
        self.config = ThreeDConfig.from_mapping({field.name: given[field.name] for field in fields(ThreeDConfig)})
        """The settings, as they were given."""
        self._processes = ProcessSettings(
            backend=process_group_backend,
            timeout=timeout,
            heartbeat_timeout=heartbeat_timeout,
            start_method=start_method,
        )
        self.num_nodes = 1
        super().__init__()
        self.run = Run(self, self._processes, self.config)
        """The present run of the Trainer, or the last one."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and the model, and none of what belongs to the processes and their run."""
        state: dict[str, Any] = super().__getstate__()
        return {**state, "run": None}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.run = Run(self, self._processes, self.config)
        if self._launcher is not None:
            self._configure_launcher()

    # ---- what users read and call

    @property
    def choice(self) -> Choice | None:
        """The layout that a fit has chosen, and why."""
        return self.run.choice

    @property
    def mesh(self) -> Mesh:
        """This rank's place and its process groups; there once the processes have started."""
        return self.run.ranks.mesh

    @property
    def plan(self) -> Plan:
        """The plan of what lies where; there once the Trainer has set the strategy up. Printable by rich.

        Raises:
            StepError: This process has no model yet, or never, as that of a notebook whose ranks are others.
        """
        if not self.run.is_parallel:
            raise StepError(
                "strategy.plan is there once a Trainer has set the model up in this process: read it from on_fit_start"
                " on; with the ranks of a notebook, which are other processes, only in a callback"
            )
        return self.run.parallel.present_plan

    def summon_full_params(
        self, module: nn.Module | None = None, *, writeback: bool = True
    ) -> AbstractContextManager[None]:
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
        return checkpoints.summon(self.run, module, writeback=writeback)

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """Norm of all gradients as if they lay in one process; 0-d, equal on all ranks. Every rank calls it.

        Raises:
            StepError: a rank calls it alone.
        """
        self.run.ranks.sync_check("gradient_norm")
        return self.run.parallel.gradients.norm(norm_type=norm_type)

    def report(self) -> list[RankReport]:
        """The share of the model that each rank holds, by rank. Every rank calls it; ``report_table`` shows it."""
        return gather_reports(self.run.context, self.optimizers)

    # ---- processes

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node; Lightning's launcher of forks asks for it."""
        return number_of_processes(self)

    @property
    def _shape(self) -> MeshShape:
        return resolve_mesh_shape(self.run.config, self.num_nodes * self.num_processes)

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to give dataloaders a distributed sampler: one replica keeps the user's own order, unless it
        has that of any number of them, or goes on with that of several.
        """
        has_order = self.config.samples_per_step is not None or self.run.keeps_replicas_order
        return self._shape.size("samples") > 1 or has_order

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Also before a run, for samplers that users make."""
        return {"num_replicas": self._shape.size("samples"), "rank": self._shape.coordinate(self.global_rank).dp}

    @override
    def _configure_launcher(self) -> None:
        """A Trainer calls it as it is made, when it has told of its precision and its processes."""
        assert self.cluster_environment is not None
        num_processes, device = self.num_processes, self.root_device
        self._precision_plugin = ThreeDPrecision.translate(self.precision_plugin)
        set_world_ranks(self, self.num_nodes * num_processes)
        # Raises before any process is started.
        refuse_unbuilt(self.config, resolve_mesh_shape(self.config, self.num_nodes * num_processes))
        refuse_offload(self.config.activations, device)
        is_on_one_gpu = num_processes == 1 and device.type != "cpu"  # which may be in use already
        if is_forked(self.cluster_environment, self._processes.start_method) and not is_on_one_gpu:
            full_weights = partial(self.summon_full_params, writeback=False)
            self._launcher = ForkLauncher(self, partial(_fail, self), full_weights)
            return
        # Starts none under torchrun or SLURM, but checks that they started as many as the Trainer expects.
        self._launcher = ScriptLauncher(self.cluster_environment, num_processes, self.num_nodes, partial(_fail, self))

    # ---- the order of things

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
    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._precision_plugin = ThreeDPrecision.translate(self.precision_plugin)
        self.run = Run(self, self._processes, self.config, deepspeed=self.deepspeed, before=self.run)
        if self.deepspeed is not None:
            self.run.ranks.session.enter_context(optimizers_given(model, self.deepspeed.built))

    @override
    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """For ``configure_model`` and ``trainer.init_module()``: with a pipeline, rank 0 builds the model, in host
        memory, and the others get the weights of their stages when it is set up, and never hold those of other stages.
        """
        is_in_stages = self.run.config.pipeline_parallel_size > 1
        built = building(is_first=self.global_rank == 0) if is_in_stages else nullcontext()
        with super().tensor_init_context(empty_init), built:
            yield

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self.run.begin()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.run.decide()
        self.run.make_parallel()
        self.run.open()

    @override
    def model_to_device(self) -> None:
        """Nothing: every rank moves what it holds when the model is made parallel."""

    @override
    def on_train_start(self) -> None:
        checkpoints.begin_training(self.run)

    @override
    def on_train_end(self) -> None:
        self.run.end_training()

    @override
    def on_validation_end(self) -> None:
        self.run.parallel.settle()

    on_test_end = on_predict_end = on_validation_end

    @override
    def teardown(self) -> None:
        """Parameters stay where they are, as the model stays parallel."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        with ExitStack() as ending:  # last first, each also where others raise
            for part in (self.checkpoint_io, self.accelerator, self.precision_plugin, self.cluster_environment):
                ending.callback(part.teardown)
            ending.callback(self.run.close)

    # ---- steps

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        self.run.begin_batch()
        return self.run.steps.train(batch, rest)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        return self.run.steps.evaluate("validation_step", self.precision_plugin.val_step_context(), batch, rest)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        return self.run.steps.evaluate("test_step", self.precision_plugin.test_step_context(), batch, rest)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *rest = (*args, *kwargs.values())
        return self.run.steps.evaluate("predict_step", self.precision_plugin.predict_step_context(), batch, rest)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        with self.run.steps.backward(closure_loss):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]  # Lightning's is unannotated
        return self.run.steps.accumulate()

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self.run.optimizer_step(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    # ---- collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        user_collectives.barrier(self.run.ranks, self.root_device)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return user_collectives.broadcast(self.run.ranks, obj, self.root_device, src)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return user_collectives.reduce(self.run.ranks, tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return user_collectives.all_gather(self.run.ranks, tensor, group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return user_collectives.decide_together(self.run.ranks, decision, self.root_device, all=all)

    # ---- checkpoints

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        """Before it, as with DDP, unless ranks get their weights in setup: there is nothing to restore before."""
        return checkpoints.restores_late(self.run)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        is_as_built = checkpoints.is_as_built(self.run)
        return super().lightning_module_state_dict() if is_as_built else checkpoints.model_state(self.run)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self.run.checkpoints.optimizer_state(optimizer)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        if checkpoints.is_as_built(self.run):
            super().save_checkpoint(checkpoint, os.fspath(filepath), storage_options)
        else:
            checkpoints.save(self.run, checkpoint, filepath, storage_options)

    @override
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self.run.checkpoints.remove_checkpoint(filepath)

    @override
    def load_checkpoint(
        self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None
    ) -> dict[str, Any]:
        return checkpoints.load(self.run, checkpoint_path, weights_only=weights_only)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        checkpoints.load_model(self.run, checkpoint, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.load_optimizers(self.run, checkpoint)


def _fail(strategy: ThreeDStrategy, error: BaseException) -> Exception | None:
    """Another exception to raise in place of one that ends the present run, if any."""
    return strategy.run.fail(error)
