"""The order of samples in what the code after the blocks gets, where that has several rows of each.

    cat([view, augmented])    whole batch     a0 a1 a2 a3  b0 b1 b2 b3     two views
                              microbatches    a0 a1  b0 b1 | a2 a3  b2 b3
    x.flatten(0, 1)           whole batch     a0 a0 a1 a1 a2 a2 a3 a3      one view, two tokens of each

Shapes do not tell. So the code before and between the blocks runs on the microbatches and on the whole batch, while
stand-ins for the blocks return rows that depend on the same rows of what they get, and the results are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.pipeline.denominators import TAIL
from lightning_3d.pipeline.effects.effect import Place
from lightning_3d.pipeline.effects.step_effects import StepEffects
from lightning_3d.pipeline.joints import Draws, Joint, grown_dim, received_joints
from lightning_3d.pipeline.stage_run import Draw, StageRun
from lightning_3d.pipeline.tail_runs import TailRuns
from lightning_3d.pipeline.traces import StepCall
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.torch_internals.pytree import tree_leaves, tree_unflatten
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.trace.trace import Result, TracedCall
from lightning_3d.zero.engine import RankModule

_CLOSE = 0.05  # mean difference, relative to the spread of the values


class RowOrder:
    """Finds the number of views in each tensor that the code after the blocks gets.

    Args:
        effects: Take what the steps do; they are not applied.
        runs: Knows their traces.
    """

    def __init__(
        self, module: LightningModule, rank_module: RankModule, router: Router, effects: StepEffects, runs: TailRuns
    ) -> None:
        self._module, self._rank_module, self._router = module, rank_module, router
        self._effects, self._runs = effects, runs

    def views(self, whole: StepCall, parts: Sequence[StepCall], shares: Sequence[float]) -> list[int]:
        """The numbers of views, by tensor.

        Raises:
            StepError: no number of views makes the whole of its parts.
        """
        flow, *flows = [self._runs.flow(call) for call in (whole, *parts)]
        metas = [f.metas(f.received(TAIL)) for f in (flow, *flows)]
        dims = [joint.dim for joint in received_joints(TAIL, flow, flows, shares)]
        rows = [1 if dim is None else meta.shape[dim] for meta, dim in zip(metas[0], dims, strict=True)]
        if all(dim is None or num == whole.size for num, dim in zip(rows, dims, strict=True)):
            return [1] * len(dims)
        draws = Draws(shares)
        sent = [self._run(part, flow, i, partial(draws.note, i)) for i, part in enumerate(parts)]
        expected = self._run(whole, flows[0], len(parts), draws.repeat)
        found = []
        for position, (meta, *of_parts) in enumerate(zip(*metas, strict=True)):
            per_sample = 1 if dims[position] is None else rows[position] // whole.size
            numbers = [views for views in range(1, per_sample + 1) if per_sample % views == 0] or [1]
            given = [of_part[position] for of_part in sent]
            joined = {views: Joint(meta, of_parts, shares, views).join(given) for views in numbers}
            found.append(_closest(joined, expected[position], meta))
        return found

    def _run(self, call: StepCall, other: StageFlow, index: int, draw: Draw) -> tuple[Tensor, ...]:
        """The tensors that the code after the blocks gets.

        Args:
            other: The trace of another number of samples.
        """
        place, flow = Place(stage=0, microbatch=index, is_last=False, also_whole=True), self._runs.flow(call)
        run = _StandIns(self._router, flow, other, draw)
        kept = attributes_kept(self._router.blocks, flow.trace.sides)
        with self._effects.microbatch(place), kept, torch.no_grad():
            sent: tuple[Tensor, ...] = self._rank_module(lambda: run.run(lambda: call.run(self._module)))
            self._effects.keep(place, self._effects.collect(place))
        return sent


def _closest(joined: dict[int, Tensor], expected: Tensor, meta: TensorMeta) -> int:
    """The number of views whose tensor is the expected one."""
    if len(joined) == 1 or not meta.dtype.is_floating_point:
        return min(joined)
    differences = {views: float((tensor - expected).double().abs().mean()) for views, tensor in joined.items()}
    views = min(differences, key=lambda views: differences[views])
    if differences[views] <= _CLOSE * float((expected - expected.mean()).double().abs().mean()):
        return views
    raise StepError(
        f"The code before or between the blocks gives a tensor of shape {tuple(expected.shape)}, several rows of each"
        " sample, in an order, or with random numbers, that those of the microbatches do not make up, and the loss"
        " couples samples. Concatenate views of the batch one after the other, or set pipeline.loss='mean'."
    )


class _StandIns(StageRun):
    """A run of the code before the tail, without blocks.

    Args:
        other: The trace of another number of samples, whose shapes show which dimension is theirs.
    """

    has_replicas = False

    def __init__(self, router: Router, flow: StageFlow, other: StageFlow, draw: Draw) -> None:
        super().__init__(router, flow, 0, (), lambda _: nullcontext(), draw)
        self._other = other

    @override
    def _check_at_hand(self, values: list[Any], call: TracedCall) -> None:
        """Parameters of other stages are absent: calls that read them get stand-ins, too."""

    @override
    def _execute(self, call: TracedCall, leaves: list[Any], run: Any) -> Any:
        is_absent = any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)
        if not (call.is_block or call.is_random or is_absent):
            return super()._execute(call, leaves, run)
        return super()._execute(call, leaves, lambda values: self._stand_in(call, leaves, values))

    def _stand_in(self, call: TracedCall, leaves: list[Any], values: list[Any]) -> Any:
        position = self._position
        phases = [
            _phase(value, dim, seed=i)
            for i, (value, dim) in enumerate(zip(values, self._sample_dims(call, leaves), strict=True))
            if dim is not None
        ]

        def make(output: int, result: Result) -> Any:
            if result.tensor is None:
                return result.constant
            meta, other = (flow.trace.tensors[result.tensor] for flow in (self._flow, self._other))
            return _rows(meta, grown_dim(meta, other), phases, seed=1000 * position + output)

        return tree_unflatten(call.answer(values, make), call.spec)

    def _sample_dims(self, call: TracedCall, leaves: list[Any]) -> list[int | None]:
        """The dimension of the samples in each argument, as far as known."""
        dims: list[int | None] = []
        of_first = [tree_leaves(flow.trace.block_inputs.get(call.name)) for flow in (self._flow, self._other)]
        for i, leaf in enumerate(leaves):
            known: list[Any] = [None, None]
            if isinstance(leaf, Tensor) and leaf in self._ids:
                known = [flow.trace.tensors[self._ids[leaf]] for flow in (self._flow, self._other)]
            elif isinstance(leaf, Tensor) and all(i < len(metas) for metas in of_first):
                known = [metas[i] for metas in of_first]
            is_known = all(isinstance(meta, TensorMeta) for meta in known)
            dims.append(grown_dim(known[0], known[1]) if is_known else None)
        return dims


def _phase(value: Tensor, dim: int, *, seed: int) -> Tensor:
    """A number for each row, that goes on to vary by as much through many blocks."""
    rows = value.detach().movedim(dim, 0).flatten(1).double().nan_to_num().sin()
    generator = torch.Generator(value.device).manual_seed(seed)
    weights = torch.randn(rows.shape[1], generator=generator, device=value.device, dtype=torch.float64)
    phase: Tensor = 3 * (rows @ weights) / max(1, rows.shape[1]) ** 0.5
    return phase


def _rows(meta: TensorMeta, dim: int | None, phases: Sequence[Tensor], *, seed: int) -> Tensor:
    """Numbers between 0 and 1, each row by the phases of the same rows; zeros for integers."""
    if not meta.dtype.is_floating_point:
        return torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device)
    shape = list(meta.shape)
    num_rows = 1 if dim is None else shape.pop(dim)
    template = torch.rand(shape, generator=torch.Generator(meta.device).manual_seed(seed), device=meta.device)
    phase = torch.zeros(num_rows, device=meta.device)
    for of_input in phases:
        num = len(of_input)
        if num and num_rows % num == 0:
            phase = phase + of_input.repeat_interleave(num_rows // num).float()
        elif num_rows and num % num_rows == 0:
            phase = phase + of_input.view(num_rows, -1).sum(1).float()
    made = 0.5 + 0.5 * (6.3 * template + phase.view(-1, *(1 for _ in shape))).sin()
    return (made[0] if dim is None else made.movedim(0, dim)).to(meta.dtype)
