"""``RanksStrategy``: the processes of a run, their mesh, and the collectives that Lightning and users ask for."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from typing_extensions import override

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.data.replica_environment import replica_environment
from lightning_3d.distributed.mesh import (
    Mesh,
    MeshShape,
    forget_meshes,
    refuse_unbuilt,
    resolve_mesh_shape,
    shared_mesh,
    warn_of_slow_groups,
)
from lightning_3d.distributed.objects import broadcast_object, default_backends
from lightning_3d.distributed.replica_world import replica_world
from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import ConfigError
from lightning_3d.ranks.process_exit import end_in_order
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.ranks.restarts import store_of_start
from lightning_3d.ranks.run_control import RunControl
from lightning_3d.ranks.same_settings import check_same_settings
from lightning_3d.torch_internals import lightning_helpers
from lightning_3d.torch_internals.data_loops import around_data
from lightning_3d.torch_internals.launchers import ForkLauncher, RunLauncher, ScriptLauncher, is_forked
from lightning_3d.torch_internals.process_groups import one_gloo_thread
from lightning_3d.trainer.requirements import refuse_offload
from lightning_3d.trainer.user_collectives import all_gather, reduce, refuse_in_stages

StartMethod = Literal["popen", "fork"]


class RanksStrategy(ParallelStrategy):
    """Starts ranks, gives each its place on the mesh, and ends all of them alike.

    Args:
        backend: Of the default process group; by default the one for the device, beside gloo for objects.
        timeout: The timeout of collectives.
        heartbeat_timeout: All ranks end when the process of one has given no sign of life for so long.
        start_method: How the other processes of a node are started.

    Raises:
        ConfigError: there is no such way.
    """

    def __init__(
        self,
        config: ThreeDConfig,
        backend: str | None,
        timeout: timedelta,
        heartbeat_timeout: timedelta,
        start_method: StartMethod,
    ) -> None:
        if start_method not in get_args(StartMethod):
            raise ConfigError(f"start_method={start_method!r}: it is one of {', '.join(get_args(StartMethod))}")
        super().__init__()
        self._start_method = start_method
        self.config, self.num_nodes = config, 1
        self._process_group_backend = backend
        self._timeout, self._heartbeat_timeout = timeout, heartbeat_timeout
        self._mesh: Mesh | None = None
        self._rendezvous: Rendezvous | None = None
        self._control: RunControl | None = None  # while a Trainer runs on several ranks
        self._session = ExitStack()  # undone in teardown

    @property
    @override
    def root_device(self) -> torch.device:
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank]

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices) if self.parallel_devices is not None else 0

    @property
    def mesh(self) -> Mesh:
        """This rank's place and its process groups; there once the processes have started."""
        assert self._mesh is not None, "the mesh is made in setup_environment"
        return self._mesh

    @property
    def _shape(self) -> MeshShape:
        return resolve_mesh_shape(self.config, self.num_nodes * self.num_processes)

    @property
    def _met(self) -> Rendezvous:
        assert self._rendezvous is not None, "the rendezvous is opened in setup_environment"
        return self._rendezvous

    @property
    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    def is_distributed(self) -> bool:
        """Tells Lightning to give dataloaders a distributed sampler: one replica keeps the user's own order."""
        return self._shape.dp > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Also before a run, for samplers that users make."""
        return {"num_replicas": self._shape.dp, "rank": self._shape.coordinate(self.global_rank).dp}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment and the rank-zero helpers who we are; the accelerator connector calls it."""
        if self.cluster_environment is not None:
            self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]  # a function attribute

    # ---- the processes of a run

    @override
    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        # Raises before any process is started.
        refuse_unbuilt(resolve_mesh_shape(self.config, self.num_nodes * self.num_processes))
        refuse_offload(self.config.activations, self.root_device)
        is_on_one_gpu = self.num_processes == 1 and self.root_device.type != "cpu"  # which may be in use already
        if is_forked(self.cluster_environment, self._start_method) and not is_on_one_gpu:
            full_weights = partial(self.summon_full_params, writeback=False)
            self._launcher = ForkLauncher(self, self._fail, full_weights)
            return
        # Starts none under torchrun or SLURM, but checks that they started as many as the Trainer expects.
        self._launcher = ScriptLauncher(self.cluster_environment, self.num_processes, self.num_nodes, self._fail)

    def summon_full_params(
        self, module: nn.Module | None = None, *, writeback: bool = True
    ) -> AbstractContextManager[None]:
        """A context in which the model is as in one process; every rank enters it."""
        raise NotImplementedError

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        shape = self._shape
        self._before_seed = Generators(self.root_device).states()
        if shape.dp > 1:  # as DDP does; a single replica goes on with the random numbers of one process
            reset_seed()
        self.set_world_ranks()
        self._connect(shape)
        end_in_order()
        if self._rendezvous is None:
            self._rendezvous = Rendezvous.open(self._timeout.total_seconds())
        if shape.world_size > 1:
            assert isinstance(self._launcher, RunLauncher)
            seconds = self._heartbeat_timeout.total_seconds()
            self._control = RunControl(self._module.trainer, shape, self._launcher, timeout=seconds)
            self._control.open()
            standstill = self._control.standstill
            self._met.is_standstill = lambda: standstill.is_certain
            check_same_settings(self._module.trainer, self.config)
        warn_of_slow_groups(shape, self.num_processes)
        self._make_mesh()

    def _change_mesh(self) -> None:
        """Make that of settings that were chosen since."""
        self._make_mesh()
        if self.mesh.shape.dp == 1:
            Generators(self.root_device).restore(self._before_seed)

    def _make_mesh(self) -> None:
        """Give each rank its place, as it is configured now."""
        shape, zero = self._shape, self.config.zero
        if self._control is not None:
            self._control.place(shape)
        self._mesh = shared_mesh(
            shape,
            device_type=self.root_device.type,
            zero_stage=zero.stage,
            shard_size=zero.shard_size,
            timeout=self._timeout,
        )
        if shape.is_model_parallel:
            self._session.enter_context(replica_world(self._mesh))
            self._session.enter_context(around_data(partial(replica_environment, self._module.trainer)))

    def _connect(self, shape: MeshShape) -> None:
        self._process_group_backend = self._process_group_backend or default_backends(self.root_device)
        if dist.is_initialized():
            return
        assert self.cluster_environment is not None
        store = store_of_start(shape.world_size, self._timeout)
        meeting: dict[str, Any] = {} if store is None else {"store": store}
        device_id = None if self.root_device.type == "cpu" else self.root_device
        with one_gloo_thread():
            lightning_helpers.connect(
                self.cluster_environment,
                self._process_group_backend,
                timeout=self._timeout,
                device_id=device_id,
                **meeting,
            )

    def _fail(self, error: BaseException) -> Exception | None:
        """Another exception to raise in place of one that ends a run, if any."""
        forget_meshes()
        self._session.enter_context(lightning_helpers.torn_down_anyway(self._module.trainer))
        return None if self._control is None else self._control.fail(error, self._session)

    @property
    def _is_alone(self) -> bool:
        """Whether no other rank would take part in a collective."""
        return not dist.is_initialized() or (self._control is not None and self._control.has_failed)

    @override
    def teardown(self) -> None:
        """Parameters stay where they are, as the model stays parallel."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        control, self._control = self._control, None
        with ExitStack() as ending:  # last first, each also where others raise
            ending.callback(self.checkpoint_io.teardown)
            ending.callback(self.accelerator.teardown)
            ending.callback(self.precision_plugin.teardown)
            ending.callback(self.cluster_environment.teardown)
            if control is not None:
                self._met.is_standstill = lambda: False
                ending.callback(control.close)
            ending.callback(self._session.close)

    # ---- collectives

    @override
    def barrier(self, name: str | None = None) -> None:
        if self._is_alone:
            return
        refuse_in_stages(self.mesh, "barrier")
        self._met.sync_point()
        device_ids = [self.root_device.index] if dist.get_backend() == "nccl" else None
        dist.barrier(device_ids=device_ids)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._is_alone:
            return obj
        refuse_in_stages(self.mesh, "broadcast")
        self._met.sync_point()
        return broadcast_object(obj, self.root_device, src=src)

    @override
    def reduce(self, tensor: Tensor | Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor) or self._is_alone:
            return tensor
        if group is None:  # else not all ranks need come here
            self._met.sync_point()
        return reduce(tensor, self.mesh, group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if group is None:
            self._met.sync_point()
        return all_gather(tensor, self.mesh, group, sync_grads=sync_grads)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Decide over all ranks."""
        if self._is_alone:
            return decision
        self._met.sync_point()
        flag = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(flag, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)
        return bool(flag)
