"""ZeRO stages 0 to 2 on plain parameters, whole on every rank.

Stage 0 all-reduces gradients, and every rank steps everything. At stage 1 they are reduce-scattered after the last
backward of a step, every rank steps its rows, and the parameters are gathered; stage 2 reduce-scatters in every
backward. Then ``grad`` is None and each rank has its rows of the reduced gradients, unless someone may look at them:
for them they are made whole (`Zero.show_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.axes import ROLES
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.zero.buckets import make_buckets
from lightning_3d.zero.dp_comm import DPComm
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.gathering import Gathering
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.owners import choose_owners, kinds_of
from lightning_3d.zero.power_sgd import PowerSGD
from lightning_3d.zero.reducer import GradientReducer
from lightning_3d.zero.shard import RankShard

_POWER_SGD_START = 1000


class PlainParameters(Zero):
    """Stages 0 to 2, and a single replica.

    Args:
        pipeline_stages: Parameter -> the one pipeline stage whose backward makes its gradient; not of those in glue,
            and none without a pipeline.
        pp_ranks: Parameter -> the ranks of the pp axis that hold it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        config: ZeroConfig,
        pipeline_stages: Mapping[nn.Parameter, int],
        pp_ranks: Mapping[nn.Parameter, tuple[int, ...]],
    ) -> None:
        super().__init__(module)
        self._stage, self._dtype = config.stage, config.dtype
        self._power_sgd_rank = config.power_sgd_rank
        self._power_sgd_start = _POWER_SGD_START if config.power_sgd_start == "auto" else config.power_sgd_start
        self._bucket_bytes = None if config.bucket_size == "auto" else 2**20 * config.bucket_size
        self._splits_backward = False
        present = [parameter for parameter in self.root.parameters() if not parameter.is_meta]
        self._replicas = DPComm(mesh) if mesh.shape.size("state") > 1 else None
        self._compressing: dist.ProcessGroup | None = None
        if self._replicas is not None and self._power_sgd_rank is not None:  # its hook goes on in callbacks
            self._compressing = mesh.groups.make_once(mesh.shape.ranks_along(ROLES["state"]), runs_callbacks=True)
        self.num_sharing = 1 if self._replicas is None else self._replicas.num_shards
        self.shards = {parameter: self._shard(parameter, mesh) for parameter in present}
        self._by_rows = dict(self.shards)
        self._pipeline_stages, self._pp_ranks = pipeline_stages, pp_ranks
        self._reducers: dict[int | None, GradientReducer] = {}  # by the pipeline stage that makes the gradients
        if self._replicas is not None:
            self._gathering = Gathering(self._replicas)

    @override
    def assign_shards(self, kinds: Mapping[Optimizer, OptimizerKind]) -> None:
        if self._replicas is None:
            return
        steps = kinds_of(self.root.parameters(), kinds)
        whole = [p for p, kind in steps.items() if kind == "parameters" and p.dim() and p.numel()]
        if self.num_sharing > 1:
            self.owners = choose_owners(whole, self.num_sharing, self._pp_ranks)
        for parameter, shard in self._by_rows.items():
            if steps[parameter] == "all":
                shard = RankShard(parameter=parameter)
            elif parameter in self.owners and shard.size > 1:
                shard = replace(shard, owner=self.owners[parameter])
            self.shards[parameter] = shard
        self.release()
        groups: dict[int | None, list[RankShard]] = {}
        for parameter in reversed(self.shards):  # about as a backward finishes them
            if parameter.numel() and (parameter.is_floating_point() or parameter.is_complex()):
                groups.setdefault(self._pipeline_stages.get(parameter), []).append(self.shards[parameter])
        for stage, group in groups.items():
            buckets = make_buckets(
                group,
                self._replicas,
                num_bytes=self._bucket_bytes,
                dtype=self._dtype,
                compression=self._compression,
            )
            self._reducers[stage] = GradientReducer(buckets, self._receive, self.gather_grads)

    def _compression(self, index: int) -> PowerSGD | None:
        if self._power_sgd_rank is None or self._compressing is None:
            return None
        return PowerSGD(self._compressing, rank=self._power_sgd_rank, start=self._power_sgd_start, seed=index)

    @override
    def release(self) -> None:
        self.wait_params()
        for reducer in self._reducers.values():
            reducer.remove()
        self._reducers, self._held = {}, {}

    def _shard(self, parameter: nn.Parameter, mesh: Mesh) -> RankShard:
        if self._replicas is None or self._stage == 0 or parameter.dim() == 0 or not parameter.numel():
            return RankShard(parameter=parameter)
        dp = mesh.sliced("dp_shard", "tp") if isinstance(parameter, DTensor) else mesh.sliced("dp_shard")
        return RankShard(parameter=parameter, size=self._replicas.num_shards, rank=self._replicas.shard_rank, mesh=dp)

    def _receive(self, shard: RankShard, own: Tensor) -> None:
        parameter, own = shard.parameter, own.to(shard.parameter.dtype)
        if shard.size > 1:
            self._held[parameter] = own if parameter not in self._held else self._held[parameter].add_(own)
        elif parameter.grad is None:
            parameter.grad = shard.like_parameter(own)
        else:
            parameter.grad.add_(shard.like_parameter(own))

    # ---- a step

    @override
    def begin_step(self, *, splits_backward: bool) -> None:
        self._splits_backward = splits_backward
        for reducer in self._reducers.values():
            reducer.begin()
            reducer.is_on = reducer.sync_at_backward_end = False

    @override
    @contextmanager
    def stage_backward(self, stage: int, *, is_last: bool) -> Iterator[None]:
        reducer = self._reducers.get(stage)
        if reducer is None or self._splits_backward or not (is_last or self._stage == 2):
            yield
            return
        reducer.collect()
        reducer.is_on = True
        try:
            yield
        finally:  # the other replicas do
            reducer.is_on = False
            reducer.launch_rest()

    @override
    def end_step(self) -> None:
        for reducer in self._reducers.values():
            if reducer.is_launched:
                reducer.collect()
            else:
                reducer.flush()

    @override
    def abandon_step(self) -> None:
        self.end_step()
        self.take_gradients()

    @override
    def set_accumulating(self, accumulating: bool) -> None:
        for reducer in self._reducers.values():
            reducer.begin()
            reducer.is_on, reducer.sync_at_backward_end = self._stage == 2 or not accumulating, True

    @override
    def before_backward(self, loss: Tensor) -> None:
        if loss.requires_grad and self._reducers:
            loss.register_hook(self._begin_backward)

    @override
    def stop_sync(self) -> None:
        for reducer in self._reducers.values():
            reducer.is_on = False

    @override
    def sync_stray_grads(self) -> None:
        for reducer in self._reducers.values():
            reducer.flush_late()

    def _begin_backward(self, _: Tensor) -> None:
        for reducer in self._reducers.values():
            reducer.begin_backward()

    @override
    def gather_grads(self) -> None:
        if self._replicas is None or not self.shows_gradients or not self._held:
            return
        shards = [self.shards[parameter] for parameter in self._held]
        wholes = []
        for shard in shards:
            whole = torch.empty_like(shard.parameter, requires_grad=False)
            shard.own(whole).copy_(self._held[shard.parameter])
            wholes.append(whole)
        gathering = Gathering(self._replicas)
        gathering.begin(shards, wholes)
        gathering.finish()
        for shard, whole in zip(shards, wholes, strict=True):
            gradient = shard.parameter.grad
            shard.parameter.grad = whole if gradient is None else gradient.add_(whole)
        self._held = {}

    @override
    def begin_forward(self) -> None:
        self.wait_params()

    @override
    def wait_params(self) -> None:
        if self._replicas is not None:
            self._gathering.finish()

    @override
    def all_gather_params(self, parameters: Iterable[nn.Parameter]) -> None:
        shards = [self.shards[parameter] for parameter in parameters if self.shards[parameter].size > 1]
        if shards:
            self._gathering.begin(shards, [shard.parameter for shard in shards])
            self._gathering.defer_wait()
