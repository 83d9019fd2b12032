"""ZeRO stage 3 on FSDP2: parameters, gradients and optimizer states sharded.

One ``fully_shard`` unit per block and one for what is left, below one root per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pipelining import finish_backward
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.shard import RankShard


class FullySharded(Zero):
    """Stage 3 with several replicas, or with offloaded parameters.

    Args:
        blocks: The blocks that this rank runs.
        reduce_dtype: Of gradients that are reduced; their own if None.
        offload: Where FSDP2 keeps its shards.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        blocks: Iterable[nn.Module],
        reduce_dtype: torch.dtype | None,
        offload: OffloadPolicy,
    ) -> None:
        super().__init__(module)
        shard = partial(fully_shard, offload_policy=offload)
        dp, policy = mesh.device_mesh["dp_shard"], MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        absent = {parameter for parameter in self.root.parameters() if parameter.is_meta}
        tied = _tied_parameters(self.root)
        for block in blocks:
            if not tied.intersection(block.parameters()):  # tied parameters belong to the root unit
                shard(block, mesh=dp, mp_policy=policy, reshard_after_forward=True)
        shard(self.root, mesh=dp, mp_policy=policy, reshard_after_forward=True, ignored_params=absent)
        assert isinstance(self.root, FSDPModule)
        self._fsdp: FSDPModule = self.root
        self.shards = {p: RankShard(parameter=p) for p in self.root.parameters() if not p.is_meta}

    @override
    def divide(self, kinds: Mapping[Optimizer, OptimizerKind]) -> None:
        """Nothing: FSDP2 has divided them."""

    @override
    def release(self) -> None:
        """Nothing: FSDP2's units stay."""

    @override
    def begin_step(self, *, splits_backward: bool) -> None:
        # FSDP2's hooks do not know of weight gradients that come after the backward of their unit: then parameters and
        # gradients stay whole until the end of the step.
        self._fsdp.set_requires_gradient_sync(not splits_backward)
        self._fsdp.set_reshard_after_forward(not splits_backward)
        self._fsdp.set_reshard_after_backward(not splits_backward)
        self._fsdp.set_is_last_backward(False)

    @override
    def end_step(self) -> None:
        self._fsdp.set_reshard_after_forward(True)
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_reshard_after_backward(True)
        self._fsdp.set_is_last_backward(True)
        finish_backward(self._fsdp)

    @override
    def set_accumulating(self, accumulating: bool) -> None:
        self._fsdp.set_is_last_backward(not accumulating)

    @override
    def before_backward(self, loss: Tensor) -> None:
        """Nothing: units have hooks on their outputs."""

    @override
    def show_gradients(self) -> None:
        """Nothing: ``grad`` is the shard of the gradient, a DTensor like the parameter."""

    @override
    def begin_gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: units gather their parameters when they run."""

    @override
    def drop_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing: they are where ``zero_grad`` looks for them."""

    @override
    def begin_forward(self) -> None:
        """Nothing: units gather their parameters when they run."""

    @override
    def settle(self) -> None:
        for unit in self.root.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()


def _tied_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner in module.modules():
        for parameter in parameters_of(owner).values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(owner)
    return {parameter for parameter, where in owners.items() if len(where) > 1}
