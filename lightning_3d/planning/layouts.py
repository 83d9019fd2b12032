"""The layouts that a run may have, and which of them is the fastest that fits: a search over pure predictions.

A replica's batch is what the dataloader gives, so that layouts are compared by the time of a step over their replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table

from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.config.zero import ZeroConfig
from lightning_3d.distributed.axes import AXES
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import MemoryPlanError, ThreeDError

_MOST_PLANNED = 16  # layouts that fit; planning one takes up to seconds
_MARGIN = 0.02  # predictions that differ by less count as equal
_ENOUGH = 0.1  # a layout of plain replicas that waits for a smaller part of its step is taken at once
_WITHOUT_AGAIN = 0.75  # of what a layout computes that recomputes all
_ROUNDS = (1, 2, 4)  # microbatches for each stage of a pipeline
_MOST_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A mesh, and what goes with it."""

    shape: MeshShape
    zero_stage: Literal[0, 1, 2, 3] = 1
    num_microbatches: int = 1

    def __str__(self) -> str:
        microbatches = f", {self.num_microbatches} microbatches" if self.shape.pp > 1 else ""
        zero = f", ZeRO {self.zero_stage}" if self.shape.size("state") > 1 else ""
        return f"{self.shape.short_text}{zero}{microbatches}"

    @property
    def is_replicas(self) -> bool:
        """Whether every rank has the whole batch of a replica to itself, as with DDP or FSDP."""
        return self.shape.size("replica") == 1

    @property
    def replicas(self) -> int:
        """The number of ranks that draw samples of their own."""
        return self.shape.size("samples")

    def takes_more_than(self, other: Layout) -> bool:
        """Whether a rank has no smaller part of the model and of a batch than in another layout, about."""
        cut, also = self.shape.sizes, other.shape.sizes
        return (
            all(cut[axis.name] <= also[axis.name] for axis in AXES if axis.has_one_batch)
            and self.zero_stage <= other.zero_stage
            and self.num_microbatches <= other.num_microbatches
        )

    @property
    def idle(self) -> float:
        """The part of a step in which ranks wait for other stages, where all of these take the same time."""
        return (self.shape.pp - 1) / (self.num_microbatches + self.shape.pp - 1)

    def of(self, config: ThreeDConfig) -> ThreeDConfig:
        """The settings with this layout.

        Raises:
            ConfigError: they do not go together.
        """
        pipeline = replace(config.pipeline, num_microbatches=self.num_microbatches if self.shape.pp > 1 else "auto")
        sizes: dict[str, Any] = {**self.shape.settings}
        return replace(
            config,
            layout="given",
            zero=replace(config.zero, stage=self.zero_stage),
            pipeline=pipeline,
            **sizes,
        )


def candidates(
    config: ThreeDConfig, world_size: int, ranks_per_node: int, num_samples: int, *, cuts_sequences: bool = False
) -> list[Layout]:
    """The layouts that keep what is set, the simplest first: replicas, at ZeRO stage 1.

    Args:
        num_samples: Of a replica's batch; 1 if it can't be split.
        cuts_sequences: Whether those that cut sequences are meant, where that is not set, in place of all others.
    """
    found = _candidates(config, world_size, ranks_per_node, num_samples, cuts_sequences=cuts_sequences)
    return sorted(found, key=lambda each: (each.shape.size("replica"), each.shape.pp))


def _candidates(
    config: ThreeDConfig, world_size: int, ranks_per_node: int, num_samples: int, *, cuts_sequences: bool
) -> Iterator[Layout]:
    for shape in _shapes(config, world_size, cuts_sequences=cuts_sequences):
        if config.tensor_parallel_size == 1 and ranks_per_node % shape.tp:  # its groups would be across nodes
            continue
        if config.samples_per_step is not None and config.samples_per_step % (shape.size("samples") * num_samples):
            continue
        stages: tuple[Literal[0, 1, 2, 3], ...] = (1, 0, 3)
        is_free = config.zero.stage == ZeroConfig().stage and shape.size("state") > 1
        for stage in stages if is_free else [config.zero.stage]:
            for number in _microbatches(config, shape.pp, num_samples):
                yield Layout(shape=shape, zero_stage=stage, num_microbatches=number)


def _shapes(config: ThreeDConfig, world_size: int, *, cuts_sequences: bool) -> Iterator[MeshShape]:
    """Meshes of so many ranks that keep the sizes that are set."""
    of_batch = [axis for axis in AXES if axis.has_one_batch]
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    given = [getattr(config, axis.setting) for axis in of_batch]
    free = [
        [size] if size > 1 else [d for d in divisors if axis.cuts != "sequence" or (d > 1) == cuts_sequences]
        for axis, size in zip(of_batch, given, strict=True)
    ]
    for sizes in product(*free):
        dp, rest = divmod(world_size, prod(sizes))
        if rest == 0 and config.data_parallel_size in ("auto", dp):
            yield MeshShape(dp=dp, **dict(zip([axis.name for axis in of_batch], sizes, strict=True)))


def _microbatches(config: ThreeDConfig, pp: int, num_samples: int) -> list[int]:
    if pp == 1 or config.pipeline.mode == "inline":
        return [1]
    if config.pipeline.num_microbatches != "auto":
        return [config.pipeline.num_microbatches]
    return [pp * rounds for rounds in _ROUNDS if pp * rounds <= num_samples and num_samples % (pp * rounds) == 0]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The time and the memory of a layout."""

    seconds: float
    """The time of a step."""
    computing: float
    """The part of them that one rank computes."""
    peak: int
    """Bytes of the rank that takes the most."""
    recomputes: bool
    """Whether blocks are recomputed to fit, where none is set."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The layout that was chosen, and why."""

    layout: Layout
    reason: str
    predicted: Mapping[Layout, Prediction]
    refused: Mapping[Layout, str]
    """Layouts that can't run, and why."""
    num_samples: int = 1
    """Samples of a replica's batch."""

    @property
    def recomputes(self) -> bool:
        """Whether it fits only where blocks are recomputed."""
        return self.layout in self.predicted and self.predicted[self.layout].recomputes

    def of(self, config: ThreeDConfig) -> ThreeDConfig:
        """The settings with what was chosen."""
        chosen = self.layout.of(config)
        return replace(chosen, activations=replace(chosen.activations, recompute="auto")) if self.recomputes else chosen

    @property
    def ranking(self) -> list[Layout]:
        """Layouts that can run, the fastest first; simpler ones go before those that gain next to nothing."""
        return ranked(self.predicted)

    @property
    def yaml(self) -> str:
        """The settings that give this layout, for a file."""
        layout, sizes = self.layout, self.layout.shape.settings
        lines = ["layout: given", f"data_parallel_size: {sizes.pop('data_parallel_size')}"]
        lines += [f"{setting}: {size}" for setting, size in sizes.items() if size > 1]
        lines.append(f"zero: {{stage: {layout.zero_stage}}}")
        lines += [f"pipeline: {{num_microbatches: {layout.num_microbatches}}}"] if layout.shape.pp > 1 else []
        lines += ["activations: {recompute: auto}"] if self.recomputes else []
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: seconds of a step and bytes by layout."""
        return {
            "chosen": str(self.layout),
            "reason": self.reason,
            "settings": self.yaml,
            "predicted": {str(each): {"seconds": p.seconds, "peak": p.peak} for each, p in self.predicted.items()},
            "refused": {str(layout): why for layout, why in self.refused.items()},
        }

    def __rich__(self) -> RenderableType:
        lines: list[RenderableType] = [f"Layout: {self.layout}, as {self.reason}"]
        if self.predicted:
            lines.append(self._table())
        return Group(*lines, "To keep it, whatever is measured another time:", self.yaml)

    def _table(self) -> Table:
        table = Table("layout", title="predicted steps")
        for name in ("step", "samples", "per sample", "peak"):
            table.add_column(name, justify="right")
        table.add_column("")
        for layout in self.ranking[:_MOST_SHOWN]:
            seen, samples = self.predicted[layout], self.num_samples * layout.replicas
            note = "chosen" if layout == self.layout else "recomputes" if seen.recomputes else ""
            times = (f"{1e3 * seen.seconds:,.1f} ms", f"{samples:,}", f"{1e3 * seen.seconds / samples:,.3f} ms")
            table.add_row(str(layout), *times, f"{seen.peak / 2**30:.2f} GiB", note)
        for layout, why in list(self.refused.items())[:_MOST_SHOWN]:
            table.add_row(str(layout), "", "", "", "", why.partition(". ")[0])
        return table


def ranked(predicted: Mapping[Layout, Prediction]) -> list[Layout]:
    """By the time of a sample; before all others the simplest of those that are as fast as the fastest, about."""
    order = sorted(predicted, key=lambda each: predicted[each].seconds / each.replicas)
    if not order:
        return []
    most = (1 + _MARGIN) * predicted[order[0]].seconds / order[0].replicas
    equal = [each for each in predicted if predicted[each].seconds / each.replicas <= most]  # the simplest first
    return [equal[0], *(each for each in order if each != equal[0])]


def _is_slower(layout: Layout, predicted: Mapping[Layout, Prediction]) -> bool:
    """Whether it can't be the fastest, even if its ranks shared evenly what a replica computes at least."""
    if not predicted:
        return False
    fastest = min(seen.seconds / each.replicas for each, seen in predicted.items())
    least = min(
        seen.computing * each.shape.size("replica") * (_WITHOUT_AGAIN if seen.recomputes else 1)
        for each, seen in predicted.items()
    )
    return least / layout.shape.world_size / (1 - layout.idle) >= fastest


def search(
    layouts: Sequence[Layout],
    predict: Callable[[Layout], Prediction],
    too_large: Callable[[Layout], str | None],
    num_samples: int,
    *,
    keeps_replicas: bool = False,
) -> Choice:
    """Predict what may be the fastest, until nothing else can be.

    Args:
        layouts: From `candidates`.
        predict: Raises where a layout can't run.
        too_large: Why a layout does not fit, whatever its activations take, or None.
        num_samples: Of a replica's batch.
        keeps_replicas: Whether every rank stays a replica as long as that fits, whatever would be faster.
    """
    predicted, refused, misfits = dict[Layout, Prediction](), dict[Layout, str](), list[Layout]()

    def look_at(layout: Layout) -> None:
        try:
            if (why_not := too_large(layout)) is not None:
                refused[layout] = why_not
                return
            if (less := next((each for each in misfits if layout.takes_more_than(each)), None)) is not None:
                refused[layout] = f"it takes no less memory than {less}, which does not fit"
                return
            predicted[layout] = predict(layout)
        except ThreeDError as error:
            refused[layout] = str(error)
            if isinstance(error, MemoryPlanError):
                misfits.append(layout)

    def chosen(layout: Layout, reason: str) -> Choice:
        return Choice(layout=layout, reason=reason, predicted=predicted, refused=refused, num_samples=num_samples)

    replicas = [each for each in layouts if each.is_replicas]
    for layout in replicas:
        if layout.zero_stage < 3 or not predicted:  # which sends more
            look_at(layout)
    first = ranked(predicted)[0] if predicted else None
    if first is not None:
        share = predicted[first].computing / predicted[first].seconds
        if share >= 1 - _ENOUGH and not predicted[first].recomputes:
            return chosen(first, f"ranks compute in {share:.0%} of its step, and it fits")
        if keeps_replicas:
            return chosen(first, "it fits, and a step has as many samples as with DDP; layout=planned compares all")
    stage = 1 if first is None else first.zero_stage
    others = [
        each for each in layouts if not each.is_replicas and (each.replicas == 1 or each.zero_stage in (stage, 3))
    ]
    most = len(predicted) + _MOST_PLANNED
    for layout in sorted(others, key=lambda each: (each.idle, each.zero_stage)):
        if replace(layout, zero_stage=stage) in predicted:
            continue
        if _is_slower(layout, predicted):
            continue
        if len(predicted) == most:
            break
        look_at(layout)
    if not predicted:
        fallback = (replicas or layouts)[-1]  # which holds the least
        return chosen(fallback, f"none is predicted to fit: {refused.get(fallback, 'too large')}")
    planned = f"of the {len(predicted)} that were planned and fit, within {_MARGIN:.0%}"
    return chosen(ranked(predicted)[0], f"its samples take the least time {planned}")
