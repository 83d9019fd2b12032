"""ZeRO stage 3 on FSDP2: parameters, gradients and optimizer states sharded.

One ``fully_shard`` unit per block and one for what is left, below one root per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.config.settings import ZeroConfig
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pipelining import finish_backward
from lightning_3d.zero.engine import Zero
from lightning_3d.zero.optimizer_kind import OptimizerKind
from lightning_3d.zero.outside_reads import OutsideReads
from lightning_3d.zero.replicas import Replicas
from lightning_3d.zero.shard import RankShard


class FullySharded(Zero):
    """Stage 3 with several replicas, or with offloaded parameters.

    Args:
        chains: The blocks that this rank runs, by pipeline stage, in the order of their first call.
        offload: Where FSDP2 keeps its shards.
        device: Where steps run.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh,
        config: ZeroConfig,
        chains: Sequence[Sequence[nn.Module]],
        offload: OffloadPolicy,
        device: torch.device,
    ) -> None:
        super().__init__(module)
        dp, policy = mesh.device_mesh["dp_shard"], MixedPrecisionPolicy(reduce_dtype=config.dtype)
        absent = {parameter for parameter in self.root.parameters() if parameter.is_meta}
        tied = _tied_parameters(self.root)
        self._keeps = mesh.shape.pp > 1 if config.reshard_after_forward == "auto" else not config.reshard_after_forward
        reshards = not self._keeps
        shard = partial(fully_shard, mesh=dp, mp_policy=policy, offload_policy=offload, reshard_after_forward=reshards)
        self._reads = OutsideReads(Replicas(mesh.group("dp")), config.dtype, device)
        wholes = self._reads.wholes((fqn, p) for fqn, p in module.named_parameters() if p not in absent)
        for block in dict.fromkeys(block for chain in chains for block in chain):
            if not tied.intersection(block.parameters()):  # tied parameters belong to the root unit
                shard(block)
        shard(self.root, ignored_params=absent)
        assert isinstance(self.root, FSDPModule)
        self._fsdp: FSDPModule = self.root
        self._units = [unit for unit in self.root.modules() if isinstance(unit, FSDPModule)]
        self.shards = {p: RankShard(parameter=p) for p in self.root.parameters() if not p.is_meta}
        self._reads.watch(((fqn, p) for fqn, p in module.named_parameters() if p in self.shards), wholes)
        self.root.around = self._reads.on
        for unit in self._units[1:]:
            assert isinstance(unit, nn.Module)
            unit.register_forward_pre_hook(self._reads.read_arguments, prepend=True, with_kwargs=True)
        _prefetch(chains, config.prefetch)

    @override
    def divide(self, kinds: Mapping[Optimizer, OptimizerKind]) -> None:
        """Nothing: FSDP2 has divided them."""

    @override
    def release(self) -> None:
        """Nothing: FSDP2's units stay."""

    @override
    def begin_step(self, *, splits_backward: bool) -> None:
        # FSDP2's hooks do not know of weight gradients that come after the backward of their unit: then parameters and
        # gradients stay whole until the end of the step, too.
        self._set(keeps=self._keeps or splits_backward)
        self._fsdp.set_is_last_backward(False)

    def _set(self, *, keeps: bool) -> None:
        for unit in self._units:
            unit.set_reshard_after_forward(not (keeps or self._keeps), recurse=False)
            unit.set_reshard_after_backward(not keeps, recurse=False)
            unit.set_requires_gradient_sync(not keeps, recurse=False)

    @override
    def end_step(self) -> None:
        self._set(keeps=False)
        self._fsdp.set_is_last_backward(True)
        finish_backward(self._fsdp)
        self._reads.reduce()

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
        self._reads.forget()
        self._reads.reduce()
        self._fsdp.reset_iter_state()


def _prefetch(chains: Sequence[Sequence[nn.Module]], num_ahead: int | Literal["auto"]) -> None:
    """Let every unit gather those that follow it in a chain, in the backward those before it."""
    if num_ahead == "auto":
        return
    for chain in chains:
        units: list[FSDPModule] = [unit for unit in dict.fromkeys(chain) if isinstance(unit, FSDPModule)]
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + num_ahead])
            unit.set_modules_to_backward_prefetch(units[max(0, i - num_ahead) : i][::-1])


def _tied_parameters(module: nn.Module) -> set[nn.Parameter]:
    owners: dict[nn.Parameter, set[nn.Module]] = {}
    for owner in module.modules():
        for parameter in parameters_of(owner).values():
            if parameter is not None:
                owners.setdefault(parameter, set()).add(owner)
    return {parameter for parameter, where in owners.items() if len(where) > 1}
