"""Values of a training step that are not finite, and which block made them, under ``Trainer(detect_anomaly=True)``.

Nothing is raised where it is found, as other ranks would wait for this one in a schedule or a collective. It is noted,
the step runs on to the end of its backward, and then all ranks raise alike (``trainer/anomaly.py``). So torch's own
check, which raises inside of a backward, is off meanwhile, and hooks on the nodes of the graph look at what it would.

[Note: infinities]
An infinity may be meant: a mask, the logits of choices that are left out. So one is only noted, and counts once
something else is certain: a NaN, or a loss that is not finite. Then it may be what that comes from, and is told first.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.model.block_runner import Call
from lightning_3d.tensor.vocabulary.sharded_output import ShardedOutput
from lightning_3d.torch_internals.autograd import (
    backwards_seen,
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


class Value(IntEnum):
    """The worst value in some tensors."""

    FINITE = 0
    INFINITE = 1
    NAN = 2

    def __str__(self) -> str:
        return ("finite values", "inf", "nan")[self]


class Phase(IntEnum):
    """The part of a microbatch's computation, in order."""

    FORWARD = 0
    LOSS = 1
    BACKWARD = 2


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not finite, on one rank in one microbatch."""

    stage: int
    microbatch: int
    num_microbatches: int
    phase: Phase
    order: int
    """Sorts the findings of one stage, microbatch and phase, alike on the ranks that compute it."""
    gave: Value
    took: Value = Value.FINITE
    """The worst value that a block was called with."""
    block: str | None = None
    """FQN of the block that computed it; None for code outside of blocks."""
    after: str | None = None
    """FQN of the block that ran last on this stage before that code."""
    parameter: str | None = None
    """Name in the block of the first parameter that is not finite."""
    detail: str = ""
    """Torch's words for a backward that returns NaNs."""
    frames: tuple[str, ...] = ()
    """The lines of the user's code that called the forward of that backward, outermost first."""

    @property
    def is_certain(self) -> bool:
        """Whether it can't be meant; see [Note: infinities]."""
        return self.gave == Value.NAN or self.phase == Phase.LOSS

    @property
    def place(self) -> tuple[int, int, int]:
        """Sorts the findings of one microbatch as its computation goes through the stages and back."""
        return self.phase, -self.stage if self.phase == Phase.BACKWARD else self.stage, self.order


class StepWatch:
    """Watches a training step on this rank.

    Args:
        router: Shows the calls of the blocks.
        sees_backward: Whether a NaN in the backward of the loss is an anomaly.
    """

    def __init__(self, router: Router, *, sees_backward: bool = True) -> None:
        self._router, self._sees_backward = router, sees_backward
        self.findings: list[Finding] = []

    @contextmanager
    def microbatch(self, stage: int, index: int, num_microbatches: int) -> Iterator[MicrobatchWatch]:
        """Watch the blocks inside, where a stage runs the forward of a microbatch."""
        watch = MicrobatchWatch(
            self._router.blocks, self.findings, stage, index, num_microbatches, sees_backward=self._sees_backward
        )
        self._router.watch = watch
        try:
            with backwards_seen(watch.see_inner_backward):
                yield watch
        finally:
            self._router.watch = None


class MicrobatchWatch:
    """Watches a microbatch on a stage.

    Args:
        blocks: FQN -> block.
        findings: Gets the first finding of each kind.
    """

    def __init__(
        self,
        blocks: Mapping[str, nn.Module],
        findings: list[Finding],
        stage: int,
        index: int,
        num_microbatches: int,
        *,
        sees_backward: bool,
    ) -> None:
        self._sees_backward = sees_backward
        self._block_of, self._findings, self._phase = blocks, findings, Phase.FORWARD
        self._found = partial(Finding, stage=stage, microbatch=index, num_microbatches=num_microbatches)
        self._first_node = next_node_number()
        self._starts: list[int] = []  # by call of a block: the number of the first node of the graph that it made
        self._ends: list[int] = []
        self._blocks: list[str] = []  # by call: FQN
        self._is_in_block = False
        self._noted: set[tuple[Phase, bool]] = set()

    def run(self, fqn: str, call: Call, *args: Any, **kwargs: Any) -> Any:
        """Run the call of a block, and look at what it takes and gives."""
        if self._is_in_block or is_in_backward():  # seen already, the latter in the forward that is recomputed
            return call(*args, **kwargs)
        self._phase = Phase.FORWARD
        took = worst_value(tree_leaves((args, kwargs)))
        self._starts.append(next_node_number())
        self._ends.append(sys.maxsize)
        self._blocks.append(fqn)
        self._is_in_block = True
        try:
            output = call(*args, **kwargs)
        finally:
            self._is_in_block = False
        self._ends[-1] = next_node_number()
        gave = worst_value(tree_leaves(output))
        if gave != Value.FINITE:
            named = self._block_of[fqn].named_parameters()
            parameter = next((name for name, p in named if worst_value([p]) != Value.FINITE), None)
            order = len(self._blocks)
            self._note(
                self._found(phase=self._phase, order=order, block=fqn, took=took, gave=gave, parameter=parameter)
            )
        return output

    def see_loss(self, loss: Tensor) -> None:
        """Look at a loss before its backward."""
        if (value := worst_value([loss])) != Value.FINITE:
            after = self._blocks[-1] if self._blocks else None
            self._note(self._found(phase=Phase.LOSS, order=0, after=after, gave=value))

    def see_inner_backward(self, outputs: Iterable[Any]) -> None:
        """Let a backward be watched that the user's code runs in the forward."""
        if self._phase == Phase.FORWARD:
            self._watch_nodes(outputs)

    def see_backward(self, outputs: Iterable[Any]) -> None:
        """Let the backward of these outputs be watched; their forward is done."""
        self._phase = Phase.BACKWARD
        if self._sees_backward:
            self._watch_nodes(outputs)

    def _watch_nodes(self, outputs: Iterable[Any]) -> None:
        for node in reachable_nodes(leaf for leaf in outputs if isinstance(leaf, Tensor)):
            if node.next_functions:  # else it puts a gradient into a parameter, which several microbatches do
                watch = partial(self._on_node, node.name(), number_of_node(node), frames_of_forward(node))
                node.register_hook(watch)  # which does not refer to the node: no garbage collector would see that

    def _on_node(self, name: str, number: int, frames: list[str], outputs: Iterable[Any], _: Iterable[Any]) -> None:
        if (self._phase, True) in self._noted:
            return
        position = next((i for i, output in enumerate(outputs) if worst_value([output]) == Value.NAN), None)
        if position is None:
            return
        call = bisect_right(self._starts, number) - 1
        is_in_block = call >= 0 and number < self._ends[call]
        finding = self._found(
            phase=self._phase,
            order=self._first_node - number if self._phase == Phase.BACKWARD else len(self._blocks),
            block=self._blocks[call] if is_in_block else None,
            after=self._blocks[call] if call >= 0 else None,
            gave=Value.NAN,
            detail=f"Function {name!r} returned nan values in its {position}th output",
            frames=_of_user(frames),
        )
        self._note(finding)

    def _note(self, finding: Finding) -> None:
        if (finding.phase, finding.is_certain) not in self._noted:
            self._noted.add((finding.phase, finding.is_certain))
            self._findings.append(finding)


@torch.no_grad()
def worst_value(leaves: Iterable[Any]) -> Value:
    """The worst floating value in this rank's parts of these tensors; other leaves count as finite."""
    worst = Value.FINITE
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            continue
        values = _values(leaf)
        if values.is_meta or values.isfinite().all():
            continue
        if values.isnan().any():
            return Value.NAN
        worst = Value.INFINITE
    return worst


def _values(tensor: Tensor) -> Tensor:
    """All values that this rank has of a tensor, without a collective."""
    tensor = untransformed(tensor)
    if isinstance(tensor, ShardedOutput):
        tensor = tensor.local
    elif isinstance(tensor, DTensor):
        tensor = local_tensor(tensor)
    if tensor.layout != torch.strided or tensor.is_nested:
        tensor = (tensor.coalesce() if tensor.is_sparse else tensor).values()
    return tensor.float() if tensor.dtype.itemsize == 1 else tensor


def _of_user(frames: list[str]) -> tuple[str, ...]:
    """The innermost frames outside of torch, Lightning and this package."""
    own = [frame for frame in frames if not frame.startswith(_LIBRARIES)]
    return tuple(own[-_NUM_FRAMES:])
