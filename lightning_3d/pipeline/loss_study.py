"""Finding out how losses, and what else a step gives, come from those of microbatches (``loss_kind.py``).

The code after the blocks runs on two parts of a batch and on both in one, on random outputs of blocks, and values and
gradients are compared; also for batches whose data are mixed, and on outputs of both signs, as thresholds tell signs
apart (`logits > 0`). Nothing of it is applied, and blocks don't run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from typing_extensions import override

from lightning_3d.distributed.rng import host_position, seed_host
from lightning_3d.errors import StepError
from lightning_3d.model.reals import as_reals
from lightning_3d.pipeline.coupling_blocks import coupling_blocks
from lightning_3d.pipeline.denominators import LOSS_CODE, read
from lightning_3d.pipeline.effects.merge import REDUCTIONS, Merger, Reduction, averaged
from lightning_3d.pipeline.effects.norms import Norms
from lightning_3d.pipeline.effects.step_effects import HostNumbersAlike, StepEffects
from lightning_3d.pipeline.glue_run import CoupledError
from lightning_3d.pipeline.loss_code_runs import LossCodeRun, LossCodeRuns
from lightning_3d.pipeline.loss_kind import LossKind, factor_of, is_close, kind_of, tolerance
from lightning_3d.pipeline.microbatch_concat import Draws, MicrobatchConcat, received_concats
from lightning_3d.pipeline.microbatches import batch_size, map_tensors, samples_of
from lightning_3d.pipeline.traces import StepCall, Traces, cached
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.interception import Router
from lightning_3d.trace.side_outputs import attributes_kept
from lightning_3d.trace.trace import Trace
from lightning_3d.zero.engine import RankModule
from lightning_3d.zero.master_weights import is_half

_NUM_DRAWS = 6  # of random outputs: three for the batch's own data, then three for mixed data
_SIGNED = 2  # the last draw for the batch's own data, of both signs
_MIXED = 3  # the first draw for mixed data
_HALF_EMPTY = 5  # the last draw for mixed data, which leaves nothing valid in the first part
_LOGIT = 4.0  # greatest size of numbers of both signs, whose sigmoid comes near to 0 and to 1
_OF_PROBABILITIES = "binary_cross_entropy"  # which aborts a GPU's process where it gets other numbers
_IGNORED = -100  # where torch ignores labels unless told otherwise
_EXACT = 1e-6
_NUM_SEEDS = 32
_READS = frozenset({"__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist"})


@dataclass(frozen=True, kw_only=True)
class LossFound:
    """How what a step gives comes from what its microbatches give."""

    kind: LossKind
    averages: Mapping[str, Set[Reduction]] = field(default_factory=dict)
    """Name of a floating-point value -> the ways in which it may be joined; none if it can't be."""
    denominators: frozenset[int] = frozenset()
    """Which of the numbers that the step divides by show the weights of a weighted loss."""
    ends_in_trace: bool = False
    """Whether the loss is seen to be made before data of blocks is read, which ends a trace."""
    failure: str | None = None
    """Why the step could not be studied."""
    coupling: StepError | None = None
    """Why microbatches can't run the code before and between the blocks."""
    coupling_blocks: tuple[str, ...] = ()
    """FQNs of those that couple samples; seen when a step is studied for the first time."""


@dataclass(frozen=True, kw_only=True)
class _Compared:
    """A comparison of the losses of parts of a batch with that of the whole."""

    weights: list[float] | None
    """Factors of the parts' losses in that of the whole; None if there are none."""
    kind: LossKind
    denominators: frozenset[int]
    """Which of the numbers that the step divides by have the weights for the parts' shares."""
    clamps_loss: bool
    """As of a ``WatchedTail``."""
    branches_on_data: bool
    is_finite: bool
    """Whether the loss is; and gradients of outputs of both signs, which roots and logarithms have none of."""
    rtol: float


def _denominators(weights: list[float] | None, of_parts: Tensor, of_whole: Tensor, rtol: float) -> frozenset[int]:
    """Which numbers, (parts, numbers), have these weights for the parts' shares, and add up to the whole's."""
    if weights is None:
        return frozenset()
    total = of_parts.sum(0)
    shares = (of_parts / total).T.tolist()
    add_up = [is_close(*pair, rtol) for pair in zip(total, of_whole, strict=True)]
    return frozenset(k for k, own in enumerate(shares) if add_up[k] and _are_close(own, weights, rtol))


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
        self._traces, self._device, self._blocks = traces, device, router.blocks
        self._trials = _Trials()
        self._host = HostNumbersAlike()
        self._effects = StepEffects(module, router, self._host, Norms(module, router), merger=self._trials)
        self._runs = LossCodeRuns(module, rank_module, router, self._effects, traces)
        self._repeats_per_sample: OrderedDict[Hashable, Sequence[int]] = OrderedDict()
        self._trusted: set[Hashable] = set()  # steps whose weights were seen to be shares in their denominator

    def trace(self, call: StepCall) -> Trace:
        """The trace of a step."""
        return self._traces.trace(call)

    def find(self, call: StepCall, *, size: int) -> LossFound | None:
        """Study a training step; None where that shows nothing, as its loss is not finite.

        Args:
            size: Samples in its smallest microbatch, of which there are two at least.
        """
        try:
            with (
                self._isolated(_halves(call, call.batch, size)),
                self._traces.deciding(call, notes_values=False) as deciding,  # also past the end of its trace
            ):
                return self._find(deciding, size)
        except Exception as error:
            return LossFound(kind=LossKind.WHOLE, failure=f"{type(error).__name__}: {error}")

    def coupling(self, call: StepCall, *, size: int) -> StepError | None:
        """Why microbatches can't run the code before and between the blocks; None if it takes each sample by itself.

        It is run on the batch's own data, several times if it draws numbers of Python's or NumPy's, or of torch's
        that it may read, which may decide what it does (``if random.random() < 0.5``), and on mixed data, as rows of a
        batch may be the same.

        Args:
            size: As for ``find``.
        """
        halves = _halves(call, call.batch, size)
        try:
            with self._isolated(halves):
                self._compare_glue(halves, 0)
                for seed in range(1, _NUM_SEEDS if self._may_decide_by_draws(call) else 1):
                    self._compare_glue(halves, seed)
                try:
                    self._compare_glue(_halves(call, _mixed(call.batch, size, _MIXED), size), 0)
                except CoupledError:
                    raise
                except Exception:
                    return None  # the step does not take such data
        except Exception as error:
            return error if isinstance(error, StepError) else StepError(f"{type(error).__name__}: {error}")
        return None

    def coupling_blocks(self, call: StepCall, *, size: int) -> tuple[str, ...]:
        """FQNs of the blocks that are seen to couple samples.

        Args:
            size: As for ``find``.
        """
        part, _, whole = _halves(call, call.batch, size)
        try:
            of_whole, of_part = self.trace(whole), self.trace(part)
            with self._effects.undone(), attributes_kept(self._blocks, of_whole.block_side_effects):
                return tuple(coupling_blocks(self._blocks, of_whole, of_part))
        except Exception:
            return ()  # the step does not run, which others tell

    def _may_decide_by_draws(self, call: StepCall) -> bool:
        """After the code before the blocks has run."""
        seed_host(0)  # as traces begin
        trace = self._traces.trace(call)
        draws_on_host = trace.host_position != host_position()
        return draws_on_host or (self._runs.has_drawn and not _READS.isdisjoint(trace.of_batch))

    def _compare_glue(self, halves: Sequence[StepCall], seed: int) -> None:
        *parts, whole = halves
        self._host.seed = seed
        try:
            self._runs.repeats_per_sample(whole, parts, _shares_of_samples(parts), seed=seed)
        finally:
            self._host.seed = 0

    def weights(self, whole: StepCall, parts: Sequence[StepCall], denominator: int) -> list[float]:
        """The weights of the losses of a batch's parts: their shares in what the loss is divided by.

        Raises:
            StepError: they are others.
        """
        of_samples = _shares_of_samples(parts)
        with self._isolated(parts):
            numbers = read([self._runs.denominators(part) for part in parts])
        own = numbers[:, denominator] if denominator < numbers.shape[1] else torch.zeros(len(parts))
        shares: list[float] = (own / own.sum()).tolist()  # no numbers where no label of the batch is valid
        if own.sum() and ((whole.name, whole.state) in self._trusted or _are_close(shares, of_samples, _EXACT)):
            return shares
        with self._isolated((*parts, whole)):  # the first batch that tells
            compared = self._compare(whole, parts, seed=0)
        if not compared.is_finite:
            return of_samples  # it is no number in one process, too
        if compared.weights is None or not _are_close(shares, compared.weights, compared.rtol):
            raise StepError(
                f"The loss of {whole.name} was found to be a weighted mean over samples, but that of this batch couples"
                " them. Set pipeline.loss='whole'."
            )
        self._trusted.add((whole.name, whole.state))
        return shares

    def repeats_per_sample(self, whole: StepCall, parts: Sequence[StepCall]) -> Sequence[int]:
        """The numbers of views in what the code after the blocks gets, by tensor.

        Raises:
            StepError: they can't be told.
        """

        def find() -> Sequence[int]:
            with self._isolated((*parts, whole)):
                return self._runs.repeats_per_sample(whole, parts, _shares_of_samples(parts))

        return cached(self._repeats_per_sample, _kinds(whole, parts), find)

    @contextmanager
    def _isolated(self, calls: Sequence[StepCall]) -> Iterator[None]:
        """Study these calls inside, whose traces are made before."""
        for call in calls:
            self._runs.flow(call)
        with self._effects.isolated():
            yield

    def _find(self, call: StepCall, size: int) -> LossFound | None:
        self._trials.fits = {}
        compared: dict[int, _Compared] = {}  # by draw
        for draw in range(_NUM_DRAWS):
            batch = _mixed(call.batch, size, draw) if draw > _SIGNED else call.batch
            *parts, whole = _halves(call, batch, size)
            if draw == _SIGNED and any(c.name == _OF_PROBABILITIES for c in self._runs.flow(whole).trace.calls):
                continue
            try:
                found = self._compare(whole, parts, seed=draw)
            except Exception:
                if draw == 0:
                    raise
                continue  # the step does not take such data, or such outputs of blocks
            if found.is_finite:  # else no label may be valid in both
                compared[draw] = found
        if not compared:
            return None
        denominators = frozenset.intersection(*(found.denominators for found in compared.values()))
        if denominators and any(found.kind == LossKind.WEIGHTED for found in compared.values()):
            self._trusted.add((call.name, call.state))
        kind = _kind(compared, denominators)
        ends_in_trace = not any(found.branches_on_data for found in compared.values())
        return LossFound(kind=kind, averages=self._trials.fits, denominators=denominators, ends_in_trace=ends_in_trace)

    def _compare(self, whole: StepCall, parts: Sequence[StepCall], *, seed: int) -> _Compared:
        shares = _shares_of_samples(parts)
        *flows, flow = [self._runs.flow(call) for call in (*parts, whole)]
        find_repeats = partial(self._runs.repeats_per_sample, whole, parts, shares)
        repeats_per_sample = cached(self._repeats_per_sample, _kinds(whole, parts), find_repeats)
        concats = received_concats(LOSS_CODE, flow, flows, shares, repeats_per_sample)
        given = [
            _random_outputs(of_part.metas(of_part.received(LOSS_CODE)), seed, i) for i, of_part in enumerate(flows)
        ]
        merged = []
        for concat, of_parts in zip(concats, zip(*given, strict=True), strict=True):
            tensor = concat.join([tensor.detach() for tensor in of_parts])
            merged.append(tensor.requires_grad_(of_parts[0].requires_grad))
        divided = read([self._runs.denominators(call) for call in (*parts, whole)])
        draws, runs = Draws(shares, takes_places=True), []
        for i, part in enumerate(parts):
            runs.append(self._runs.run(part, given.pop(0), index=i, draw=partial(draws.note, i)))
        run = self._runs.run(whole, merged, index=len(parts), draw=draws.repeat)
        is_autocast = torch.is_autocast_enabled(self._device.type)
        rtol = tolerance(is_half=is_autocast or any(is_half(tensor) for tensor in merged))
        weights = _weights(run, runs, concats, merged, rtol)
        is_smooth = all(gradient is None or bool(gradient.isfinite().all()) for gradient in run.of_received)
        is_finite = bool(run.loss.isfinite()) and (is_smooth or seed != _SIGNED)
        if is_finite:
            self._trials.loss_weights, self._trials.rtol = weights or (), rtol
            sizes = [*(part.size for part in parts), whole.size]
            self._effects.study([run.output for run in (*runs, run)], sizes, whole.name)
        return _Compared(
            weights=weights,
            kind=kind_of(weights, shares, rtol),
            denominators=_denominators(weights, divided[:-1], divided[-1], rtol),
            clamps_loss=run.clamps_loss,
            branches_on_data=run.branches_on_data,
            is_finite=is_finite,
            rtol=rtol,
        )


def _halves(call: StepCall, batch: object, size: int) -> list[StepCall]:
    """The same call on the first `size` samples of a batch, on as many that follow, and on both.

    Each is cut from the batch itself: a list in it may be as long as the samples of a part, and is none of theirs.
    """
    ends = (0, size), (size, 2 * size), (0, 2 * size)
    return [replace(call, batch=samples_of(batch, *of_part)) for of_part in ends]


def _kinds(whole: StepCall, parts: Sequence[StepCall]) -> tuple[Hashable, ...]:
    return whole.kind, *(part.kind for part in parts)


def _shares_of_samples(parts: Sequence[StepCall]) -> list[float]:
    sizes = [part.size for part in parts]
    return [size / sum(sizes) for size in sizes]


def _random_outputs(metas: Sequence[TensorMeta], seed: int, part: int) -> list[Tensor]:
    """Random outputs of blocks for a part of a batch, greater ones for one part than for the other."""
    tensors = []
    for position, meta in enumerate(metas):
        seed_of_tensor = ((1 + part) * _NUM_DRAWS + seed) * len(metas) + position
        tensor = meta.random(torch.Generator(meta.device).manual_seed(seed_of_tensor))
        if tensor.is_floating_point() or tensor.is_complex():
            if seed == _SIGNED:
                tensor = (2 * tensor - 1) * _LOGIT
            tensor /= 1 + (part + seed) % 2
        tensors.append(tensor.requires_grad_(meta.requires_grad))
    return tensors


def _kind(compared: Mapping[int, _Compared], denominators: Set[int]) -> LossKind:
    found, rtol = compared.values(), compared[min(compared)].rtol
    own = [c.weights for draw, c in compared.items() if draw <= _SIGNED and c.weights]
    depends_on_blocks = any(not _are_close(weights, own[0], rtol) for weights in own)
    if depends_on_blocks or any(c.clamps_loss or c.weights is None for c in found):
        return LossKind.WHOLE
    # Any weight is right for a part without a valid label.
    shown = [c for c in found if c.weights and all(c.weights)] or found
    kinds = {c.kind for c in shown}
    may_vary = denominators or any(c.branches_on_data for c in found)
    if len(kinds) > 1 or LossKind.WEIGHTED in kinds or (LossKind.MEAN in kinds and may_vary):
        return LossKind.WEIGHTED if denominators else LossKind.WHOLE
    return kinds.pop()


def _weights(
    whole: LossCodeRun,
    parts: Sequence[LossCodeRun],
    concats: Sequence[MicrobatchConcat],
    received: Sequence[Tensor],
    rtol: float,
) -> list[float] | None:
    """The weights of the parts' losses in that of the whole; None if there are none."""
    columns = [concat.split(gradient) for concat, gradient in zip(concats, whole.of_received, strict=True)]
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
        merged = sum(weight * gradient for weight, gradient in own if gradient is not None)
        if expected is not None and not is_close(torch.as_tensor(merged), expected, rtol):
            return None
    trained = [concat for concat, tensor in zip(concats, received, strict=True) if tensor.requires_grad]
    return weights if _are_of_terms(weights, whole, parts, trained, rtol) else None


def _are_of_terms(
    weights: Sequence[float],
    whole: LossCodeRun,
    parts: Sequence[LossCodeRun],
    concats: Sequence[MicrobatchConcat],
    rtol: float,
) -> bool:
    """Whether each term of the loss has these weights by itself."""
    for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
        if len(part.of_terms) != len(whole.of_terms):
            return False
        for (factor, of_whole), (own_factor, of_part) in zip(whole.of_terms, part.of_terms, strict=True):
            split = [concat.split(gradient)[i] for concat, gradient in zip(concats, of_whole, strict=True)]
            found = factor_of(split, of_part, rtol)
            ratio = 1.0 if factor == own_factor or not own_factor else factor / own_factor
            is_shown = found != 0.0 or any(gradient is not None and gradient.any() for gradient in of_part)
            if found is None or (is_shown and not _are_close([found * ratio], [weight], rtol)):
                return False
    return True


def _mixed(batch: object, first: int, seed: int) -> object:
    """The same batch with other data, that change which labels are valid, and how much they weigh: integers of the
    batch's own smallest or greatest values, or such as are ignored if it has any, in the places of some. Others may be
    out of range where the step indexes by them, after which a GPU's process can't go on.

    Args:
        first: Samples in the first part that is studied.
    """
    generator, num_samples = torch.Generator().manual_seed(seed), batch_size(batch)

    def mixed(tensor: Tensor) -> Tensor:
        if tensor.ndim == 0 or not tensor.numel():
            return tensor
        chosen = (torch.rand(tensor.shape, generator=generator) < torch.rand((), generator=generator)).to(tensor.device)
        if seed == _HALF_EMPTY and len(tensor) == num_samples:  # a divisor of at least one shows
            chosen[:first] = False
        if tensor.is_floating_point() or tensor.is_complex():
            return tensor * chosen
        if tensor.dtype == torch.bool or (tensor.min() >= 0 and tensor.max() <= 1):
            return chosen.to(tensor.dtype)
        ignored = tensor.new_full((), _IGNORED) if (tensor == _IGNORED).any() else tensor.min()
        others = (tensor.min(), tensor.max(), ignored)
        return torch.where(chosen, tensor, others[seed % len(others)])

    return map_tensors(batch, mixed)


class _Trials(Merger):
    """Joins the values of parts of a batch in every way, and compares with that of the whole, which comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.rtol = tolerance(is_half=False)
        self.fits: dict[str, Set[Reduction]] = {}
        """By name: the ways in which all values so far could be joined."""

    @override
    def number(
        self, values: Sequence[Tensor | float], sizes: Sequence[int], name: str, how: Reduction = "samples"
    ) -> Tensor:
        *parts, whole = [torch.as_tensor(value) for value in values]
        hows = [how for how in REDUCTIONS if how != "loss" or self.loss_weights]
        merged = {how: averaged(parts, sizes[:-1], self.loss_weights, how) for how in hows}
        fitting = {how for how, value in merged.items() if self._is_close(value, whole)}
        self.fits[name] = self.fits.get(name, fitting) & fitting
        return whole

    def _is_close(self, found: Tensor, expected: Tensor) -> bool:
        rtol, atol = self.rtol / 50, self.rtol / 1000
        found, expected = as_reals(found).double(), as_reals(expected).double()
        return torch.allclose(found, expected, rtol=rtol, atol=atol, equal_nan=True)
