"""All effects of a module's steps, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

from lightning.pytorch import LightningModule
from typing_extensions import override

from lightning_3d.distributed.generator_states import generators_of
from lightning_3d.distributed.rng import StepRandomness, random_states_kept, seed_host
from lightning_3d.errors import StepError
from lightning_3d.model.snapshot import preserved
from lightning_3d.pipeline.effects.attributes import Attributes
from lightning_3d.pipeline.effects.effect import Effect, StepContext
from lightning_3d.pipeline.effects.hooks import LazyHooks
from lightning_3d.pipeline.effects.logs import Logs
from lightning_3d.pipeline.effects.merge import Merger, are_numbers
from lightning_3d.pipeline.effects.metrics import Metrics
from lightning_3d.pipeline.loss import check_loss
from lightning_3d.trace.interception import Router


class RandomNumbers(Effect):
    """The default generators."""

    def __init__(self, randomness: StepRandomness) -> None:
        self._randomness = randomness
        self._number = 0

    @override
    def begin(self, number: int) -> AbstractContextManager[None]:
        self._number = number
        return self._randomness.step()

    @override
    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        self._randomness.seed_glue(self._number, context.microbatch, host_alike=context.runs_on_full_batch)
        yield


class HostNumbersAlike(Effect):
    """The generators of Python and NumPy, the same in all runs that are compared."""

    seed = 0

    @override
    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        seed_host(self.seed)
        yield


_TRACE = StepContext(stage=0, microbatch=0, is_last=True, is_trace=True)


class StepEffects:
    """Does for each effect what ``effect.py`` says, and is what a trace follows (``TracedEffects``).

    Args:
        more: Further effects.
        merger: Joins values over microbatches, and remembers what they mean.
    """

    def __init__(self, module: LightningModule, router: Router, *more: Effect, merger: Merger | None = None) -> None:
        self._module, self._blocks, self._merger = module, router.blocks.values(), merger or Merger()
        self._metrics = Metrics(module, router)
        self._logs = Logs(module, router, self._merger)
        attributes = Attributes(module, self._blocks)
        self._effects: tuple[Effect, ...] = (
            *(*more, LazyHooks(module)),
            *(attributes, self._metrics, self._logs),  # the logs are last
        )
        self._found: dict[int, Sequence[Any]] = {}  # microbatch -> what is kept of it, by effect
        self.has_side_effects = True
        """Whether the step that was traced last does or gives more than numbers, which join over microbatches."""

    @property
    def are_on_all_stages(self) -> bool:
        """Whether other stages than the last may do something, so that all report."""
        return any(effect.is_on_all_stages for effect in self._effects)

    @contextmanager
    def begin(self, number: int) -> Iterator[None]:
        """Around a step; ``number`` counts all."""
        self._found.clear()
        with ExitStack() as stack:
            for effect in self._effects:
                stack.enter_context(effect.begin(number))
            yield

    @contextmanager
    def microbatch(self, context: StepContext) -> Iterator[None]:
        """Around the user's step on one microbatch."""
        with ExitStack() as stack:
            for effect in self._effects:
                stack.enter_context(effect.microbatch(context))
            yield

    def collect(self, context: StepContext) -> list[object]:
        """Collect what each effect does."""
        return [effect.collect(context) for effect in self._effects]

    def keep(self, context: StepContext, found: Sequence[object]) -> None:
        """Keep what was collected where the step ends, with data in place of ghosts."""
        if context.is_last:
            pairs = zip(self._effects, found, strict=True)
            self._found[context.microbatch] = [effect.kept(own) for effect, own in pairs]

    def join(self, stage: int, sizes: Sequence[int], *, is_last: bool) -> list[object]:
        """Join what each did on a stage, which is let go of.

        Args:
            is_last: Whether the step ended there.
        """
        kept = [self._found.pop(index) for index in range(len(sizes))] if is_last else []
        return [effect.join(stage, [own[i] for own in kept], sizes) for i, effect in enumerate(self._effects)]

    def study(self, outputs: Sequence[object], sizes: Sequence[int], name: str) -> None:
        """Let the joiner see the numbers that microbatches of a step logged and returned; nothing is applied."""
        of_logs = [self._found.pop(index)[-1] for index in range(len(sizes))]
        with suppress(StepError):
            self._logs.join(0, of_logs, sizes)
        with suppress(StepError):
            self._merger.join(outputs, sizes, f"what {name} returned")

    def apply(self, merged: Sequence[tuple[Sequence[object], bool]]) -> None:
        """Do it here.

        Args:
            merged: For every stage that reports, in order: what ``join`` gave, and whether that was on this rank.
        """
        for i, effect in enumerate(self._effects):
            for of_stage, is_own in merged:
                effect.apply(of_stage[i], is_own=is_own)

    def undo(self) -> None:
        """Leave nothing of a step that has failed, inside of `begin`."""
        for effect in self._effects:
            effect.undo()
        self._found.clear()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Study steps inside, on this rank alone: nothing that they do stays."""
        try:
            with random_states_kept(), self.begin(0):
                yield
        finally:
            self._found.clear()

    # ---- TracedEffects

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Trace inside."""
        state_kept = preserved(self._module, without_data=self._blocks)
        with random_states_kept(), state_kept, self.begin(0), self.microbatch(_TRACE):
            yield

    def returned(self, name: str, step: Callable[[], object]) -> object:
        """Run the step method ``name``; returns its output and what it logged or kept."""
        self.has_side_effects = True  # in case that it is not followed to its end
        output = step()
        if name == "training_step" and self._module.automatic_optimization:
            check_loss(output)
        found = self.collect(_TRACE)
        self.has_side_effects = not are_numbers(output) or any(effect.has_side_effects for effect in self._effects)
        return output, found

    @property
    def not_microbatchable(self) -> str | None:
        """As of a ``Trace``."""
        if generators_of(self._module.modules()):
            return "Modules hold random generators of their own"
        call = self._metrics.in_block or self._logs.in_block
        return None if call is None else f"A block calls {call}"
