"""The activations' part of a plan: blocks compute again, or offload, what their backward needs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn

from lightning_3d.activations.offload import Offload
from lightning_3d.activations.partitioned_inputs import PartitionedInputs
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.activations.saved_tensor import SavedTensor
from lightning_3d.activations.transfers import SideStreams
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import Generators
from lightning_3d.model.block_runner import running
from lightning_3d.planning.plan import Plan
from lightning_3d.tensor.vocabulary.lazy_tensor import made


class BlockCheckpointing:
    """Activation checkpointing and offload of this rank's blocks, as plans say; a later plan takes an earlier's place.

    Args:
        own: FQN -> block.
    """

    def __init__(self, own: Mapping[str, nn.Module], config: ThreeDConfig, mesh: Mesh, device: torch.device) -> None:
        self._own, self._compiles = own, config.compile.enabled
        self._generators = Generators(device)
        self._offload = Offload(device, SideStreams(device)) if config.activations.offload else None
        keep = SavedTensor if self._offload is None else self._offload.keep
        self._keep = keep
        is_cut = config.activations.partition
        self._inputs = PartitionedInputs(mesh.group("tp"), keep).saved if is_cut else nullcontext
        self.full_backward_stages: set[int] = set()
        """Stages whose backward stays in one piece."""

    def apply(self, plan: Plan) -> None:
        """Let blocks do as planned from now on."""
        # Where a schedule splits the backward, torch would compute a block again for each group of weights.
        again = [block for block in plan.blocks if block.is_recomputed or self._compiles]
        self.full_backward_stages.clear()
        self.full_backward_stages.update(stage for block in again for stage in block.stages)
        for planned in plan.blocks:
            if (block := self._own.get(planned.fqn)) is None:
                continue
            recomputed = None
            if planned.recompute != "none":
                recomputed = Recomputation(
                    planned.fqn, block, planned.recompute, self._generators, made, self._inputs, self._keep
                )
            runner = running(block)
            is_left = self._compiles and planned.recompute == "selective"  # to the compiler
            runner.recomputed, runner.recomputed_eagerly = (None, recomputed) if is_left else (recomputed, None)
            runner.offloaded = None
            if self._offload is not None and planned.is_offloaded:
                runner.offloaded = partial(self._offload.call, block)
