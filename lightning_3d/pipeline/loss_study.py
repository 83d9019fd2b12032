"""Finding out how losses, and what else a step gives, come from those of microbatches (``loss_kind.py``).

The code after the blocks runs on two parts of a batch and on both in one, on random outputs of blocks, and values and
gradients are compared; also for batches whose data are mixed, and on outputs of both signs, as thresholds tell signs
apart (`logits > 0`). Nothing of it is applied, and blocks don't run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_3d.errors import StepError
from lightning_3d.model.reals import as_reals
from lightning_3d.pipeline.denominators import TAIL, read
from lightning_3d.pipeline.effects.join import Average, Joiner, averaged
from lightning_3d.pipeline.effects.norms import Norms
from lightning_3d.pipeline.effects.step_effects import HostNumbersAlike, StepEffects
from lightning_3d.pipeline.joints import Draws, Joint, received_joints
from lightning_3d.pipeline.loss_kind import LossKind, factor_of, is_close, kind_of, tolerance
from lightning_3d.pipeline.microbatches import batch_size, map_tensors, samples_of
from lightning_3d.pipeline.row_order import RowOrder
from lightning_3d.pipeline.tail_runs import TailRun, TailRuns
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.trace import Trace
from lightning_3d.zero.engine import RankModule
from lightning_3d.zero.master_weights import is_half

_NUM_DRAWS = 3  # of random outputs, for the batch and for mixed data
_SIGNED = 2 * _NUM_DRAWS  # the last draw, of both signs
_LOGIT = 4.0  # greatest size of numbers of both signs, whose sigmoid comes near to 0 and to 1
_OF_PROBABILITIES = "binary_cross_entropy"  # which aborts a GPU's process where it gets other numbers
_IGNORED = -100  # where torch ignores labels unless told otherwise
_EXACT = 1e-6


@dataclass(frozen=True, kw_only=True)
class LossFound:
    """How what a step gives comes from what its microbatches give."""

    kind: LossKind
    averages: Mapping[str, Average] = field(default_factory=dict)
    """Name of a floating-point value -> how it is joined."""
    unjoined: tuple[str, ...] = ()
    """Names of those that can't be joined."""
    denominator: int | None = None
    """Which of the numbers that the step divides by shows the weights of a weighted loss."""
    failure: str | None = None
    """Why the step could not be studied."""


@dataclass(frozen=True, kw_only=True)
class _Comparison:
    """Parts of a batch, and the whole."""

    call: StepCall
    """The step on the whole."""
    parts: Sequence[TailRun]
    whole: TailRun
    weights: list[float] | None
    """Factors of the parts' losses in that of the whole; None if there are none."""
    sizes: Sequence[int]
    """Samples of the parts, then of the whole."""
    rtol: float
    is_mixed: bool
    """Whether the batch's data were mixed."""

    @property
    def is_finite(self) -> bool:
        """Whether the loss of the whole is finite."""
        return bool(self.whole.loss.isfinite())

    @property
    def is_smooth(self) -> bool:
        """Whether gradients are finite, which those of roots and logarithms of negative numbers are not."""
        return all(gradient is None or bool(gradient.isfinite().all()) for gradient in self.whole.of_received)

    def without_tensors(self) -> _Comparison:
        """The same, without what takes memory."""
        return replace(self, parts=[part.without_tensors() for part in self.parts], whole=self.whole.without_tensors())

    @property
    def denominators(self) -> set[int]:
        """Which of the numbers that the steps divide by have the weights for the parts' shares."""
        if self.weights is None:
            return set()
        of_parts = [part.denominators for part in self.parts]
        shares = {k: _shares(of_parts, k) for k in range(len(self.whole.denominators))}
        return {k for k, own in shares.items() if own is not None and _are_close(own, self.weights, self.rtol)}

    @property
    def tells_apart(self) -> bool:
        """Whether the weights are others than the parts' shares of the samples."""
        shares = [size / self.sizes[-1] for size in self.sizes[:-1]]
        return self.weights is not None and not _are_close(self.weights, shares, self.rtol)


def _shares(of_parts: Sequence[Sequence[float]], denominator: int) -> list[float] | None:
    """The parts' shares in the sum of what they divide by; None if that is not known of all, or zero."""
    numbers = [own[denominator] for own in of_parts if len(own) > denominator]
    total = sum(numbers)
    return [number / total for number in numbers] if total and len(numbers) == len(of_parts) else None


def _are_close(found: Sequence[float], expected: Sequence[float], rtol: float) -> bool:
    return is_close(torch.tensor(found), torch.tensor(expected), rtol)


class LossStudy:
    """Studies the steps of a module; the ranks of a stage do so alike."""

    def __init__(
        self,
        module: LightningModule,
        rank_module: RankModule,
        router: Router,
        traces: Traces,
        device: torch.device,
    ) -> None:
        self._module, self._traces, self._device = module, traces, device
        self._trials = _Trials()
        self._effects = StepEffects(module, router, HostNumbersAlike(), Norms(module, router), joiner=self._trials)
        self._runs = TailRuns(module, rank_module, router, self._effects, traces)
        self._row_order = RowOrder(module, rank_module, router, self._effects, self._runs)
        self._views: OrderedDict[Hashable, Sequence[int]] = OrderedDict()
        self._trusted: set[str] = set()  # steps whose weights were seen to be shares in their denominator
        self._distrusted: set[str] = set()

    def trace(self, call: StepCall) -> Trace:
        """The trace of a step."""
        return self._traces.trace(call)

    def find(self, call: StepCall, *, size: int) -> LossFound | None:
        """Study a training step; None where that shows nothing, as its loss is not finite.

        Args:
            size: Samples in its smallest microbatch, of which there are two at least.
        """
        try:
            self._trace(self._halves(call, samples_of(call.batch, 0, 2 * size)))
            with self._effects.isolated():
                return self._find(call, 2 * size)
        except Exception as error:
            return LossFound(kind=LossKind.MEAN, failure=f"{type(error).__name__}: {error}")

    def weights(self, whole: StepCall, parts: Sequence[StepCall], found: LossFound) -> list[float]:
        """The weights of the losses of a batch's parts.

        Raises:
            StepError: there are none.
        """
        name, shares = whole.name, _shares_of_samples(parts)
        shown = self._shown(parts, found)
        if shown is not None and (name in self._trusted or _are_close(shown, shares, _EXACT)):
            return shown
        self._trace((*parts, whole))
        with self._effects.isolated():
            compared = self._compare(whole, parts, seed=0)
        if not compared.is_finite:
            return shares  # it is no number in one process, too
        if compared.weights is None:
            raise StepError(
                f"The loss of {name} was found to be a weighted mean over samples, but that of this batch couples them."
                " Set pipeline.loss='whole'."
            )
        if shown is not None and compared.tells_apart:  # for the first time
            is_right = _are_close(shown, compared.weights, compared.rtol)
            (self._trusted if is_right else self._distrusted).add(name)
        return compared.weights

    def views(self, whole: StepCall, parts: Sequence[StepCall]) -> Sequence[int]:
        """The numbers of views in what the code after the blocks gets, by tensor.

        Raises:
            StepError: they can't be told.
        """

        def find() -> Sequence[int]:
            for call in (*parts, whole):
                self._runs.flow(call)  # traced apart
            with self._effects.isolated():
                return self._find_views(whole, parts)

        return cached(self._views, _kinds(whole, parts), find)

    def _find_views(self, whole: StepCall, parts: Sequence[StepCall]) -> Sequence[int]:
        return self._row_order.views(whole, parts, _shares_of_samples(parts))

    def _shown(self, parts: Sequence[StepCall], found: LossFound) -> list[float] | None:
        """The parts' shares in what their losses are divided by, if that tells their weights."""
        if found.denominator is None or parts[0].name in self._distrusted:
            return None
        self._trace(parts)
        with self._effects.isolated():
            of_parts = [self._runs.denominators(part) for part in parts]
        return _shares(read(of_parts), found.denominator)

    def _trace(self, calls: Sequence[StepCall]) -> None:
        """Trace steps, apart from what is done with them."""
        for call in calls:
            self._runs.check(call)

    def _halves(self, call: StepCall, batch: Any) -> list[StepCall]:
        """The same call on the halves of another batch, and on the whole of it."""
        size = batch_size(batch)
        ends = (0, size // 2), (size // 2, size), (0, size)
        return [replace(call, batch=samples_of(batch, *of_part)) for of_part in ends]

    def _find(self, call: StepCall, size: int) -> LossFound | None:
        self._trials.fits = {}
        compared: list[_Comparison] = []
        for draw in range(_SIGNED + 1):
            is_mixed = _NUM_DRAWS <= draw < _SIGNED
            batch = _mixed(call.batch, draw) if is_mixed else call.batch
            *parts, whole = self._halves(call, samples_of(batch, 0, size))
            if draw == _SIGNED and any(c.name == _OF_PROBABILITIES for c in self._runs.flow(whole).trace.calls):
                continue
            try:
                comparison = self._compare(whole, parts, seed=draw, is_mixed=is_mixed)
            except Exception:
                if draw < _NUM_DRAWS:
                    raise
                continue  # the step does not take such data, or such outputs of blocks
            if comparison.is_finite and (draw < _SIGNED or comparison.is_smooth):  # else no label may be valid in both
                self._learn(call.name, comparison)
                compared.append(comparison.without_tensors())
        if not compared:
            return None
        denominators = set.intersection(*(comparison.denominators for comparison in compared))
        if denominators and any(comparison.tells_apart for comparison in compared):
            self._trusted.add(call.name)
        (seen,) = read([self._runs.denominators(compared[-1].call)])
        seen_alike = zip(seen, compared[-1].whole.denominators, strict=False)
        known = {k for k, (without, with_data) in enumerate(seen_alike) if without == with_data}
        return LossFound(
            kind=_kind(compared, denominators),
            averages={value: min(hows, key=_PREFERRED.index) for value, hows in self._trials.fits.items() if hows},
            unjoined=tuple(value for value, hows in self._trials.fits.items() if not hows),
            denominator=min(denominators & known, default=None),
        )

    def _compare(self, whole: StepCall, parts: Sequence[StepCall], *, seed: int, is_mixed: bool = False) -> _Comparison:
        shares = _shares_of_samples(parts)
        *flows, flow = [self._runs.flow(call) for call in (*parts, whole)]
        views = cached(self._views, _kinds(whole, parts), partial(self._find_views, whole, parts))
        joints = received_joints(TAIL, flow, flows, shares, views)
        given = [_random_outputs(of_part.metas(of_part.received(TAIL)), seed, i) for i, of_part in enumerate(flows)]
        joined = []
        for joint, of_parts in zip(joints, zip(*given, strict=True), strict=True):
            tensor = joint.join([tensor.detach() for tensor in of_parts])
            joined.append(tensor.requires_grad_(of_parts[0].requires_grad))
        draws, runs = Draws(shares), []
        for i, part in enumerate(parts):
            runs.append(self._runs.run(part, given.pop(0), index=i, draw=partial(draws.note, i)))
        run = self._runs.run(whole, joined, index=len(parts), draw=draws.repeat)
        is_autocast = torch.is_autocast_enabled(self._device.type)
        rtol = tolerance(is_half=is_autocast or any(is_half(tensor) for tensor in joined))
        return _Comparison(
            call=whole,
            parts=runs,
            whole=run,
            weights=_weights(run, runs, joints, rtol),
            sizes=[*(part.size for part in parts), whole.size],
            rtol=rtol,
            is_mixed=is_mixed,
        )

    def _learn(self, name: str, compared: _Comparison) -> None:
        """Find out how values are joined."""
        self._trials.loss_weights, self._trials.rtol = compared.weights or (), compared.rtol
        outputs = [run.output for run in (*compared.parts, compared.whole)]
        self._effects.study(outputs, compared.sizes, name)


def _kinds(whole: StepCall, parts: Sequence[StepCall]) -> tuple[Hashable, ...]:
    return whole.kind, *(part.kind for part in parts)


def _shares_of_samples(parts: Sequence[StepCall]) -> list[float]:
    sizes = [part.size for part in parts]
    return [size / sum(sizes) for size in sizes]


def _random_outputs(metas: Sequence[TensorMeta], seed: int, part: int) -> list[Tensor]:
    """Random outputs of blocks for a part of a batch, greater ones for one part than for the other."""
    tensors = []
    for position, meta in enumerate(metas):
        seed_of_tensor = ((1 + part) * 2 * _NUM_DRAWS + seed) * len(metas) + position
        tensor = meta.random(torch.Generator(meta.device).manual_seed(seed_of_tensor))
        if tensor.is_floating_point() or tensor.is_complex():
            if seed == _SIGNED:
                tensor = (2 * tensor - 1) * _LOGIT
            tensor /= 1 + (part + seed) % 2
        tensors.append(tensor.requires_grad_(meta.requires_grad))
    return tensors


def _kind(compared: Sequence[_Comparison], denominators: set[int]) -> LossKind:
    rtol = compared[0].rtol
    # Any weight is right for a part without a valid label.
    shown = [comparison for comparison in compared if comparison.weights is None or all(comparison.weights)] or compared
    kinds = {kind_of(comparison.weights, [0.5, 0.5], rtol) for comparison in shown}
    of_batch = [comparison.weights for comparison in compared if not comparison.is_mixed and comparison.weights]
    if any(not _are_close(weights, of_batch[0], rtol) for weights in of_batch):
        return LossKind.WHOLE  # they depend on what the blocks give
    if any(comparison.whole.has_kink for comparison in compared):
        return LossKind.WHOLE
    if len(kinds) > 1:
        return max(*kinds, LossKind.WEIGHTED)
    (kind,) = kinds
    may_depend = denominators or any(not comparison.whole.is_traced for comparison in compared)
    return LossKind.WEIGHTED if kind == LossKind.MEAN and may_depend else kind


def _weights(whole: TailRun, parts: Sequence[TailRun], joints: Sequence[Joint], rtol: float) -> list[float] | None:
    """The weights of the parts' losses in that of the whole; None if there are none."""
    columns = [joint.split(gradient) for joint, gradient in zip(joints, whole.of_received, strict=True)]
    weights = []
    for i, part in enumerate(parts):
        weight = factor_of([column[i] for column in columns], part.of_received, rtol)
        if weight is None:
            return None
        weights.append(weight)
    pairs = [(weight, part) for weight, part in zip(weights, parts, strict=True) if weight]
    losses = sum(weight * part.loss.double() for weight, part in pairs)
    if not is_close(torch.as_tensor(losses), whole.loss.double(), rtol):
        return None
    for position, expected in enumerate(whole.of_parameters):
        own = [(weight, part.of_parameters[position]) for weight, part in pairs]
        joined = sum(weight * gradient for weight, gradient in own if gradient is not None)
        if expected is not None and not is_close(torch.as_tensor(joined), expected, rtol):
            return None
    return weights


def _mixed(batch: Any, seed: int) -> Any:
    """The same batch with other data, that change which labels are valid, and how much they weigh: integers of the
    batch's own smallest or greatest values, or such as are ignored if it has any, in the places of some. Others may be
    out of range where the step indexes by them, after which a GPU's process can't go on.
    """
    generator = torch.Generator().manual_seed(seed)

    def mixed(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or not tensor.numel():
            return tensor
        chosen = (torch.rand(tensor.shape, generator=generator) < torch.rand((), generator=generator)).to(tensor.device)
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor * chosen
        if tensor.dtype == torch.bool or (tensor.min() >= 0 and tensor.max() <= 1):
            return chosen.to(tensor.dtype)
        ignored = tensor.new_full((), _IGNORED) if (tensor == _IGNORED).any() else tensor.min()
        others = (tensor.min(), tensor.max(), ignored)
        return torch.where(chosen, tensor, others[seed % _NUM_DRAWS])

    return map_tensors(batch, mixed)


_PREFERRED: tuple[Average, ...] = ("loss", "samples", "sum", "constant")


class _Trials(Joiner):
    """Joins the values of parts of a batch in every way, and compares with that of the whole, which comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.rtol = tolerance(is_half=False)
        self.fits: dict[str, set[Average]] = {}
        """By name: the ways in which all values so far could be joined."""

    @override
    def average(self, values: Sequence[Tensor | float], counts: Sequence[int], name: str) -> Tensor:
        *parts, whole = [torch.as_tensor(value) for value in values]
        hows = [how for how in _PREFERRED[:3] if how != "loss" or self.loss_weights]
        joined = {how: averaged(parts, counts[:-1], self.loss_weights, how) for how in hows}
        self._keep(name, {how for how, value in joined.items() if self._is_close(value, whole)})
        return whole

    @override
    def extreme(self, values: Sequence[Tensor | float], name: str, *, largest: bool) -> Tensor:
        *parts, whole = values
        found = super().extreme(parts, name, largest=largest)
        self._keep(name, set(_PREFERRED) if self._is_close(found, torch.as_tensor(whole)) else set())
        return torch.as_tensor(whole)

    @override
    def total(self, values: Sequence[Tensor | float], name: str) -> Any:
        *parts, whole = [torch.as_tensor(value) for value in values]
        joined: dict[Average, Tensor] = {"sum": torch.stack(parts).sum(0)}
        if all(torch.equal(part, parts[0]) for part in parts):
            joined["constant"] = parts[0]
        self._keep(name, {how for how, value in joined.items() if self._is_close(value, whole)})
        return whole

    def _keep(self, name: str, hows: set[Average]) -> None:
        self.fits[name] = self.fits.get(name, hows) & hows

    def _is_close(self, found: Tensor, expected: Tensor) -> bool:
        rtol, atol = self.rtol / 50, self.rtol / 1000
        found, expected = as_reals(found).double(), as_reals(expected).double()
        return torch.allclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
