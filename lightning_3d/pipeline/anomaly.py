"""``Trainer(detect_anomaly=True)``: all ranks raise one error, which names the block that made a NaN.

Torch's own check raises inside of the backward of one rank, for which the others would wait in a schedule or a
collective. So it is off in steps, hooks look at what it would, and all ranks raise alike after the backward.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import Call
from lightning_3d.tensor.vocabulary.sharded_output import ShardedOutput
from lightning_3d.torch_internals.autograd import (
    frames_of_forward,
    is_in_backward,
    next_node_number,
    number_of_node,
    reachable_nodes,
)
from lightning_3d.torch_internals.dtensor import local_tensor
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import untransformed
from lightning_3d.trace.interception import Router

_FOLDERS = (*(Path(package.__file__ or "").parent for package in (torch, L)), Path(__file__).parents[1])
_LIBRARIES = tuple(f'  File "{folder}{os.sep}' for folder in _FOLDERS)
_NUM_FRAMES = 5

Finding = tuple[tuple[int, ...], str]
"""A key that sorts the findings of all ranks (microbatch, replica, phase, stage, code, rank), and the message."""

_FORWARD, _LOSS, _BACKWARD = range(3)


class AnomalyDetection:
    """Watches training steps while torch's anomaly mode is on.

    Args:
        stages: FQN of a block -> its pipeline stage.
        sees_backward: Whether a NaN in a backward is an anomaly; with scaled losses it is an overflow.
    """

    def __init__(
        self, router: Router, mesh: Mesh, stages: Mapping[str, int], num_stages: int, *, sees_backward: bool
    ) -> None:
        self.router, self.mesh, self.sees_backward = router, mesh, sees_backward
        self.stages, self.num_stages = stages, num_stages
        self.findings: list[Finding] = []
        self._is_on = False

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step, or its backward, without that torch raises. Errors of the user's code tell what came before."""
        before = self._is_on
        self._is_on = before or (torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled())
        try:
            with torch.autograd.set_detect_anomaly(torch.is_anomaly_enabled(), check_nan=False):
                yield
        except Exception as error:
            if self.findings:
                error.add_note(f"Before that, {min(self.findings)[1]}")
                self.findings.clear()
            raise
        finally:
            self._is_on = before

    @contextmanager
    def microbatch(self, stage: int | None, index: int, num_microbatches: int) -> Iterator[MicrobatchWatch | None]:
        """Watch the forward of a microbatch, on a stage or, if that is None, on all; gives None if the mode is off."""
        if not (self._is_on and torch.is_grad_enabled()):
            yield None
            return
        self.router.watch = watch = MicrobatchWatch(self, stage, index, num_microbatches)
        try:
            yield watch
        finally:
            self.router.watch = None

    def error(self) -> StepError | None:
        """The first finding of any rank, alike on all; every rank calls it inside of ``step``."""
        if not self._is_on:
            return None
        everyone: list[list[Finding]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, self.findings)
        self.findings.clear()
        found = [finding for of_rank in everyone for finding in of_rank]
        return StepError(min(found)[1]) if found else None


class MicrobatchWatch:
    """Notes the first thing that goes wrong in a microbatch on this rank: in its blocks, its loss or its backward."""

    def __init__(self, detection: AnomalyDetection, stage: int | None, index: int, num_microbatches: int) -> None:
        self._detection, self._stage, self._index, self._num_microbatches = detection, stage, index, num_microbatches
        self._phase, self._is_in_block, self._has_found = _FORWARD, False, False
        self._pieces = [(0, "", "code outside of blocks")]  # of code: number of its first node, block, description

    def run(self, fqn: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run the call of a block, and look at what it takes and gives."""
        if self._is_in_block or is_in_backward():  # seen already, the latter in the forward that is computed again
            return call(*args, **kwargs)
        self._phase, self._is_in_block = _FORWARD, True
        took = _worst((args, kwargs))
        self._pieces.append((next_node_number(), fqn, f"block {fqn}"))
        try:
            output = call(*args, **kwargs)
        finally:
            self._is_in_block = False
        if _worst(output) == "nan":
            what = "was given nan, made outside of blocks before it" if took == "nan" else f"made nan out of {took}"
            self._note(f"block {fqn} {what}{self._spoiled_parameter(fqn)}")
        self._pieces.append((next_node_number(), fqn, f"code outside of blocks, after block {fqn}"))
        return output

    def _spoiled_parameter(self, fqn: str) -> str:
        router = self._detection.router
        named = () if fqn in router.absent else router.blocks[fqn].named_parameters()
        spoiled = (name for name, parameter in named if _worst(parameter) != "finite values")
        return next((f" (its parameter {name} is not finite)" for name in spoiled), "")

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss before its backward."""
        self._phase = _LOSS
        if (value := _worst(loss)) != "finite values":
            self._note(f"the loss is {value}, made by {self._pieces[-1][2]}")

    def see_backward(self, outputs: Iterable[Tensor]) -> None:
        """Let the backward of these outputs be watched; their forward is done."""
        self._phase = _BACKWARD
        for node in reachable_nodes(outputs) if self._detection.sees_backward else ():
            if node.next_functions:  # else it puts a gradient into a parameter, which several microbatches do
                watch = partial(self._on_node, node.name(), number_of_node(node), frames_of_forward(node))
                node.register_hook(watch)  # which does not refer to the node: no garbage collector would see that

    def _on_node(self, name: str, number: int, frames: list[str], outputs: Iterable[Any], _: Iterable[Any]) -> None:
        place = None if self._has_found else next((i for i, x in enumerate(outputs) if _worst(x) == "nan"), None)
        if place is None:
            return
        piece = bisect_right(self._pieces, number, key=itemgetter(0)) - 1
        own = [frame for frame in frames if not frame.startswith(_LIBRARIES)][-_NUM_FRAMES:]
        what = f"the backward of {self._pieces[piece][2]} made nan: Function {name!r} returned nan values in its"
        self._note(
            f"{what} {place}th output", piece, "".join(["\nIts forward was called at\n", *own]).rstrip() if own else ""
        )

    def _note(self, what: str, piece: int = -1, frames: str = "") -> None:
        if self._has_found:
            return
        self._has_found = True
        detection, rank, fqn = self._detection, dist.get_rank(), self._pieces[piece][1]
        way = -1 if self._phase == _BACKWARD else 1
        stage = detection.stages.get(fqn, 0) if self._stage is None else self._stage
        along = (way * (self._stage or 0), way * (piece % len(self._pieces)), int(fqn in detection.router.absent))
        message = (
            f"{what}: pipeline stage {stage} of {detection.num_stages}, microbatch {self._index} of"
            f" {self._num_microbatches}, rank {rank}, counted from 0. Trainer(detect_anomaly=True) found it before the"
            " optimizer's step: the weights are those that made it. Look at what goes into that code there; a lower"
            f" learning rate, clipped gradients or float32 for what overflows are common cures.{frames}"
        )
        detection.findings.append(((self._index, detection.mesh.dp_rank, self._phase, *along, rank), message))


@torch.no_grad()
def _worst(tree: Any) -> str:
    """The worst of this rank's floating values: "finite values", "inf" or "nan"."""
    found = "finite values"
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            values = _local_values(leaf)
            if not values.is_meta and not values.isfinite().all():
                found = "nan" if values.isnan().any() or found == "nan" else "inf"
    return found


def _local_values(tensor: Tensor) -> Tensor:
    tensor = untransformed(tensor)
    if isinstance(tensor, ShardedOutput):
        tensor = tensor.local
    elif isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    if tensor.layout != torch.strided or tensor.is_nested:
        tensor = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor
