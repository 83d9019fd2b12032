"""``Ranks``: the processes of a run, from the first collective to the last."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.replica_environment import replica_environment
from lightning_3d.distributed.mesh import (
    Mesh,
    MeshShape,
    forget_meshes,
    resolve_mesh_shape,
    shared_mesh,
    warn_of_slow_groups,
)
from lightning_3d.distributed.objects import default_backends
from lightning_3d.distributed.replica_world import replica_world
from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.process_exit import end_in_order
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.ranks.restarts import end_with_agent, resume_after_restart, store_of_start
from lightning_3d.ranks.run_control import RunControl
from lightning_3d.ranks.same_settings import check_same_settings
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.data_loops import around_data
from lightning_3d.torch_internals.launchers import RunLauncher
from lightning_3d.torch_internals.process_groups import one_gloo_thread

StartMethod = Literal["popen", "fork"]


@dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """How the processes of a run start, reach each other and are watched; the fields are arguments of the strategy.

    Raises:
        ConfigError: there is no such way to start them.
    """

    backend: str | None
    timeout: timedelta
    heartbeat_timeout: timedelta
    start_method: StartMethod

    def __post_init__(self) -> None:
        if self.start_method not in get_args(StartMethod):
            raise ConfigError(f"start_method={self.start_method!r}: it is one of {', '.join(get_args(StartMethod))}")


def number_of_processes(strategy: ParallelStrategy) -> int:
    """Processes on this node."""
    return len(strategy.parallel_devices or ())


def set_world_ranks(strategy: ParallelStrategy, world_size: int) -> None:
    """Tell the cluster environment and the rank-zero helpers who we are."""
    if strategy.cluster_environment is not None:
        rank = strategy.node_rank * number_of_processes(strategy) + strategy.local_rank
        strategy.cluster_environment.set_global_rank(rank)
        strategy.cluster_environment.set_world_size(world_size)
    rank_zero_only.rank = strategy.global_rank  # type: ignore[attr-defined]  # a function attribute


class Ranks:
    """The processes of one run: each has its place on the mesh, is watched by the others, and meets them.

    Args:
        before: Those of the run before it in this process.
    """

    def __init__(self, strategy: ParallelStrategy, settings: ProcessSettings, before: Ranks | None) -> None:
        self._strategy, self._settings = strategy, settings
        self._mesh: Mesh | None = None if before is None else before._mesh
        self._rendezvous: Rendezvous | None = None if before is None else before._rendezvous
        self.control: RunControl | None = None
        """While a Trainer runs on several ranks."""
        self.session = ExitStack()
        """The contexts that hold while it runs."""

    @property
    def mesh(self) -> Mesh:
        """This rank's place and its process groups; there once the processes have started."""
        assert self._mesh is not None, "the mesh is made in setup_environment"
        return self._mesh

    @property
    def rendezvous(self) -> Rendezvous:
        """Where ranks meet before collectives between steps."""
        assert self._rendezvous is not None, "the rendezvous is opened in setup_environment"
        return self._rendezvous

    def open(self, trainer: Trainer, config: ThreeDConfig, world_size: int) -> None:
        """Connect the processes, watch them from here on, and give each its place."""
        strategy, shape = self._strategy, resolve_mesh_shape(config, world_size)
        self._before_seed = Generators(strategy.root_device).states()
        if shape.size("samples") > 1:  # as DDP does; a single replica goes on with the random numbers of one process
            reset_seed()
        set_world_ranks(strategy, world_size)
        self._connect(world_size)
        end_in_order()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous.open(self._settings.timeout.total_seconds())
        assert isinstance(strategy.launcher, RunLauncher)
        if world_size > 1:
            seconds = self._settings.heartbeat_timeout.total_seconds()
            self.control = RunControl(trainer, shape, strategy.launcher, timeout=seconds)
            self.control.open()
            standstill = self.control.standstill
            self._rendezvous.is_standstill = lambda: standstill.is_certain
            check_same_settings(trainer, config)
        if trainer.state.fn == TrainerFn.FITTING:
            self.session.enter_context(resume_after_restart(trainer, strategy.launcher))
        warn_of_slow_groups(shape, number_of_processes(strategy))
        self._place(trainer, config, shape)

    def change_mesh(self, trainer: Trainer, config: ThreeDConfig) -> None:
        """Give each its place by settings that were chosen since."""
        self._place(trainer, config, resolve_mesh_shape(config, self.mesh.shape.world_size))
        if self.mesh.shape.size("samples") == 1:
            Generators(self._strategy.root_device).restore(self._before_seed)

    def _connect(self, world_size: int) -> None:
        if dist.is_initialized():
            return
        device, timeout = self._strategy.root_device, self._settings.timeout
        assert self._strategy.cluster_environment is not None
        end_with_agent()
        store = store_of_start(self._strategy.global_rank, world_size, timeout)
        meeting: dict[str, Any] = {} if store is None else {"store": store}
        with one_gloo_thread():
            lightning_helpers.connect(
                self._strategy.cluster_environment,
                self._settings.backend or default_backends(device),
                timeout=timeout,
                device_id=None if device.type == "cpu" else device,
                **meeting,
            )

    def _place(self, trainer: Trainer, config: ThreeDConfig, shape: MeshShape) -> None:
        if self.control is not None:
            self.control.place(shape)
        self._mesh = shared_mesh(
            shape,
            device_type=self._strategy.root_device.type,
            zero_stage=config.zero.stage,
            shard_size=config.zero.shard_size,
            timeout=self._settings.timeout,
        )
        if shape.is_model_parallel:
            self.session.enter_context(replica_world(self._mesh))
            self.session.enter_context(around_data(partial(replica_environment, trainer)))

    def fail(self, trainer: Trainer, error: BaseException) -> Exception | None:
        """Another exception to raise in place of one that ends a run, if any."""
        forget_meshes()
        self.session.enter_context(lightning_helpers.torn_down_anyway(trainer))
        return None if self.control is None else self.control.fail(error, self.session)

    @property
    def is_alone(self) -> bool:
        """Whether no other rank would take part in a collective."""
        return not dist.is_initialized() or (self.control is not None and self.control.has_failed)

    def sync_check(self, what: str) -> None:
        """Before a collective of all ranks that the user's code asks for; each calls it.

        Raises:
            StepError: another rank does something else.
        """
        self.rendezvous.sync_check(range(self.mesh.shape.world_size), what)

    def close(self) -> None:
        """Undo what holds while a run lasts, and watch no more, also where a part of it raises."""
        control, self.control = self.control, None
        with ExitStack() as ending:  # last first
            if control is not None:
                self.rendezvous.is_standstill = lambda: False
                ending.callback(control.close)
            ending.callback(self.session.close)
