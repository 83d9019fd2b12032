"""ZeRO stages 0 to 3 on FSDP2: what the data-parallel ranks share, and when gradients are reduced.

One ``fully_shard`` unit per block and one for what is left, below one root per rank; none with a single replica. Stage
0 replicates (hybrid sharding over one rank), 1 keeps the parameters gathered through the microbatches and reduces
gradients once, 2 reduce-scatters gradients as they come, 3 also reshards parameters after each forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pipelining import finish_backward


class RankModule(nn.Module):
    """All that one rank holds: the root of its FSDP units. Runs one step of the user's module inside their hooks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, run: Callable[..., Any], *received: torch.Tensor) -> Any:
        """Call ``run(*received)``; the tensors received from another stage pass through the root's hooks."""
        return run(*received)


class Zero:
    """The sharded model of one rank.

    Args:
        module: The user's module; parameters of other stages are on the meta device.
        blocks: The blocks that this rank runs.
        mesh: Its dp axis is sharded over.
        stage: ZeRO stage.
    """

    def __init__(self, module: nn.Module, blocks: Iterable[nn.Module], *, mesh: Mesh, stage: int) -> None:
        self.stage = stage
        self.root = RankModule(module)
        self._fsdp: FSDPModule | None = None
        if mesh.shape.dp > 1:  # one replica shares nothing: its parameters stay as they are
            self._fsdp = self._shard(blocks, mesh)

    def _shard(self, blocks: Iterable[nn.Module], mesh: Mesh) -> FSDPModule:
        dp_mesh = mesh.device_mesh["dp_replicate", "dp_shard"] if self.stage == 0 else mesh.device_mesh["dp_shard"]
        absent = {parameter for parameter in self.root.parameters() if parameter.is_meta}
        tied = _tied_parameters(self.root)
        for block in blocks:
            if not tied.intersection(block.parameters()):  # tied parameters belong to the root unit
                fully_shard(block, mesh=dp_mesh, reshard_after_forward=self.stage == 3)
        fully_shard(self.root, mesh=dp_mesh, reshard_after_forward=self.stage == 3, ignored_params=absent)
        assert isinstance(self.root, FSDPModule)
        return self.root

    def begin_step(self, *, splits_backward: bool) -> None:
        """Before the microbatches of a pipeline step.

        Args:
            splits_backward: Whether weight gradients come after the backward of their unit, which FSDP2's hooks do not
                know of: then parameters and gradients stay whole until the end of the step.
        """
        if self._fsdp is None:
            return
        self._fsdp.set_requires_gradient_sync(self.stage >= 2 and not splits_backward)
        self._fsdp.set_reshard_after_forward(self.stage == 3 and not splits_backward)
        self._fsdp.set_reshard_after_backward(self.stage == 3 and not splits_backward)
        self._fsdp.set_is_last_backward(False)

    def end_step(self) -> None:
        """After the microbatches: reduce what was not reduced yet, and reshard."""
        if self._fsdp is None:
            return
        self._fsdp.set_reshard_after_forward(self.stage == 3)
        self._fsdp.set_requires_gradient_sync(True)
        self._fsdp.set_reshard_after_backward(True)
        self._fsdp.set_is_last_backward(True)
        finish_backward(self._fsdp)

    def set_accumulating(self, accumulating: bool) -> None:
        """Without a pipeline: whether the next backward is followed by another before the optimizer's step."""
        if self._fsdp is None:
            return
        self._fsdp.set_requires_gradient_sync(self.stage >= 2 or not accumulating)
        self._fsdp.set_is_last_backward(not accumulating)
        self._fsdp.set_reshard_after_backward(self.stage == 3 or not accumulating)

    def reshard(self) -> None:
        """Free gathered parameters, so that none outlives a change of the shards."""
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
