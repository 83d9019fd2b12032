"""The peak of a rank's memory over one training step, by the order in which it computes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from lightning_3d.planning.memory.stage_memory import StageMemory
from lightning_3d.planning.schedule_order import Computation


def peak_of_activations(
    order: Sequence[Computation],
    stages: Mapping[int, StageMemory],
    gradients: int,
    *,
    accumulates: bool,
    keeps_gradients: bool,
    keeps_sent: bool,
    keeps_sent_back: bool,
    unsplit: Collection[int],
) -> int:
    """Bytes of activations, and of gradients as they come, at most at once.

    Args:
        order: What the rank computes.
        stages: Its stages.
        gradients: Bytes of all gradients of the rank.
        accumulates: Whether gradients of earlier steps are there when the step begins.
        keeps_gradients: Whether those of the step before are there until the first backward.
        keeps_sent: Whether what was sent in forwards is there until the step ends, as torch's schedules of several
            stages on a rank wait for it then.
        keeps_sent_back: The same for gradients.
        unsplit: Stages whose backward stays in one piece.
    """
    timeline = _Timeline(stages, gradients if accumulates or keeps_gradients else 0, accumulates=accumulates)
    timeline.keeps_sent, timeline.keeps_sent_back = keeps_sent, keeps_sent_back
    for computation in order:
        stage, kind = computation.stage, computation.kind
        if stage in unsplit and kind == "input":
            kind = "backward"
        elif stage in unsplit and kind == "weight":
            continue
        if kind != "forward" and keeps_gradients and not accumulates:
            timeline.gradients, keeps_gradients = 0, False
        getattr(timeline, kind)(stage)
    return max(timeline.peak, timeline.alive + gradients)


class _Timeline:
    """Bytes that are alive while a rank computes; a method for each kind of computation."""

    def __init__(self, stages: Mapping[int, StageMemory], gradients: int, *, accumulates: bool) -> None:
        self._stages, self.gradients = stages, gradients
        self._have_gradients = set(stages) if accumulates else set[int]()
        self.alive = self.peak = 0
        self.keeps_sent = self.keeps_sent_back = False

    def forward(self, stage: int) -> None:
        """Make activations."""
        for call in self._stages[stage].calls:
            self._see(call.before + call.forward)
        self.alive += self._stages[stage].kept

    def backward(self, stage: int) -> None:
        """Use them up."""
        for call in reversed(self._stages[stage].calls):
            self._see(call.backward)
            self.alive -= call.kept
            self._make_gradients(stage, call.gradients)
        self._end(stage)

    def input(self, stage: int) -> None:
        """Compute gradients of inputs alone."""
        for call in reversed(self._stages[stage].calls):
            self._see(call.input_backward)
            self.alive += call.held

    def weight(self, stage: int) -> None:
        """Compute those of weights."""
        for call in reversed(self._stages[stage].calls):
            self._see(call.weight_backward)
            self.alive -= call.kept + call.held
            self._make_gradients(stage, call.gradients)
        self._end(stage)

    def _see(self, more: int) -> None:
        self.peak = max(self.peak, self.gradients + self.alive + more)

    def _make_gradients(self, stage: int, num_bytes: int) -> None:
        if stage not in self._have_gradients:
            self.gradients += num_bytes
            self._see(0)

    def _end(self, stage: int) -> None:
        own = self._stages[stage]
        self.alive += self.keeps_sent * own.sent + self.keeps_sent_back * own.sent_back - own.until_end
        self._have_gradients.add(stage)
