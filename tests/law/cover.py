"""Which cases of the table are run: a cover of pairs, seeded samples of the rest, and any case by its name.

[Note: the cover]
Defects were where a setting or a habit met a layout. Each is met in a pipeline, on shards of tensors, by replicas at
stage 3 and at one of the stages below, all on two ranks, and by one layout of more ranks. Models are trained in a
pipeline and on shards of tensors. What a setting does depends on the model far less, so that no pair of those is asked
for: models are spread over settings and habits as cases come. The cases stand in a file, so that a new row adds some
and leaves the others: `python -m tests.law.cover` writes it anew.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from tests.hugging_face import HuggingFace
from tests.law.habits import HABITS
from tests.law.layouts import LAYOUTS, OTHERS, family
from tests.law.models import MODELS, WITHOUT_SEQUENCES
from tests.law.models.row import Model
from tests.law.settings import SETTINGS, Setting
from tests.parity import Job, Layout

FILE = Path(__file__).with_name("cover.txt")
"""The cases of the cover, a line each."""

TABLES: tuple[dict[str, Any], ...] = (MODELS, LAYOUTS, SETTINGS, HABITS)
"""In the order of a case's names."""

CONSIDERED = 300
"""Cases with a pair of which the best is taken."""


@dataclass(frozen=True, order=True)
class Case:
    """A name of each table."""

    model: str
    layout: str
    setting: str = "plain"
    habit: str = "none"
    accelerator: str = "cpu"
    """What the ranks of the layout train on, as the Trainer takes it; the reference runs on the CPU."""

    def __str__(self) -> str:
        return ".".join((self.model, self.layout, self.setting, self.habit))

    @property
    def model_row(self) -> Model:
        return MODELS[self.model]

    @property
    def setting_row(self) -> Setting:
        return SETTINGS[self.setting]

    @property
    def job(self) -> Job:
        """What is trained, the same in one process and in a layout."""
        return replace(self.model_row.job, accelerator=self.accelerator, **self.setting_row.job)

    @property
    def layout_row(self) -> Layout:
        """The layout with what the setting changes."""
        return self._fitted(self.layout)

    @property
    def first_layout(self) -> Layout:
        """Where a run begins that is resumed in the layout."""
        return self._fitted(OTHERS[self.layout])

    def _fitted(self, name: str) -> Layout:
        return _layout(name, self.setting, "batch statistics" in self.model_row.traits)

    @property
    def reference(self) -> str:
        """Names the run of one process, which settings that the strategy alone has do not change."""
        setting = self.setting_row
        return f"{self.model}.{self.habit}.{setting.job}.{setting.optimizer.__name__}.{setting.epochs}"

    @property
    def measures_sent(self) -> bool:
        """Whether its blocks are run once more to see what they send: with tensor parallel alone, plainly."""
        layout = self.layout_row
        is_cast = self.job.precision == "bf16-mixed" or self.setting_row.half is not None
        if is_cast or "uneven batches" in self.model_row.traits:  # it is run outside of autocast; other sizes
            return False
        return layout.tp > 1 and layout.tp == layout.world_size and layout.compile_backend is None

    @property
    def is_allowed(self) -> bool:
        """Whether the rows go together."""
        model, setting, habit = self.model_row, self.setting_row, HABITS[self.habit]
        if not _is_allowed(self.model, self.layout, self.setting):
            return False
        if habit.wraps_step and not model.has_plain_step:
            return False
        if self.habit in model.skips or self.setting in habit.skips:
            return False
        if habit.needs is not None and not hasattr(_class_of(model.job), habit.needs):
            return False
        return all(map(habit.fits, _layouts(self.layout, setting)))


@cache
def _is_allowed(model_name: str, layout_name: str, setting_name: str) -> bool:
    """Whether they go together, whatever the habit."""
    case = Case(model_name, layout_name, setting_name)
    model, setting = case.model_row, case.setting_row
    layouts, pieces = _layouts(layout_name, setting), case.layout_row.num_microbatches
    if isinstance(pieces, int) and pieces > model.job.global_batch_size // LAYOUTS[layout_name].dp:
        return False
    if setting.models is not None and model_name not in setting.models:
        return False
    if setting_name in model.skips or not all(map(model.fits, layouts)):
        return False
    if any(at.dp > 1 for at in layouts) and model.traits:
        return False
    if any(at.cp > 1 for at in layouts) and not _has_slices(model_name, setting):
        return False
    if any(at.pp > 2 for at in layouts) and "batch statistics" in model.traits:
        return False
    if any(at.pp > 1 for at in layouts) and "draws" in model.traits:
        return False
    return all(setting.suits(model, at) for at in layouts)


def _has_slices(model_name: str, setting: Setting) -> bool:
    """Whether its sequences can be cut over ranks."""
    is_unbuilt = not {"compile_backend", "sequence_parallel"}.isdisjoint(setting.layout)
    couples = MODELS[model_name].traits - {"couples samples", "uneven batches", "draws"}
    is_refused = model_name in (*WITHOUT_SEQUENCES, "collected")  # which changes views in place
    return not (is_unbuilt or couples or is_refused)


def _layouts(name: str, setting: Setting) -> list[Layout]:
    """The layouts that a run is in, one after the other."""
    return [LAYOUTS[name], LAYOUTS[OTHERS[name]]] if setting.is_resumed else [LAYOUTS[name]]


@cache
def _layout(name: str, setting: str, is_in_one_piece: bool) -> Layout:
    layout = SETTINGS[setting].in_layout(replace(LAYOUTS[name], mode="auto"))  # as users have it
    return (
        replace(layout, num_microbatches=1, schedule="gpipe") if is_in_one_piece and layout.mode != "inline" else layout
    )


def _class_of(job: Job) -> Any:
    build = job.model.func if isinstance(job.model, partial) else job.model
    return build if isinstance(build, type) else HuggingFace


@cache
def every_case() -> tuple[Case, ...]:
    """All cases that are allowed."""
    rows = [names for names in product(MODELS, LAYOUTS, SETTINGS) if _is_allowed(*names)]
    cases = (Case(*names, habit) for names in rows for habit in HABITS)
    return tuple(case for case in cases if case.is_allowed)


INLINE = ("penalised", "quantised", "balanced", "reading", "carrying", "graphs", "deep-q", "proximal-policy", "mixup")
"""Programs that stages can't follow."""

PINNED = (
    *(Case(model, "pp2", "inline") for model in INLINE),
    *(Case("quantised", layout) for layout in ("tp2", "pp2-tp2", "pp2-dp2-zero2", "pp2-dp2-zero3", "dp2-tp2-zero3")),
    *(Case("penalised", layout) for layout in ("pp2-dp2-zero2", "pp2-dp2-zero3")),
    Case("gpt", "pp2-tp2", "inline"),
    Case("swin", "tp2", "bf16"),  # proofs gave blocks 16-bit inputs, and left them dense
    Case("llama-one-kv-head", "tp4"),  # fewer heads than ranks
    Case("llama-tied", "tp4"),
    Case("llama-recomputed", "pp2-tp2"),
    Case("mixture", "pp2-dp2-zero3"),  # data decides what each replica's blocks run
    Case("frozen-stages", "pp2", "zbv"),
    *(Case(model, "pp2", "zero-bubble") for model in ("recomputed-stages", "gpt-of-two-blocks", "odd-blocks")),
    Case("odd-parameters", "dp4-zero3", "hybrid"),
    Case("odd-parameters", "dp4-zero1", "hybrid"),
    *(Case("odd-blocks", layout, "recomputed") for layout in ("tp2", "dp2-zero3")),
    Case("odd-gpt", "pp2-tp2", "selective"),
    *(Case(model, "tp2", "sequence") for model in ("linear-on-data", "odd-gpt")),  # what is gathered again
    Case("loss-mean", "pp2", "groups"),  # what the loss does not read decays
    Case("drops", "tp2", "sequence"),  # what is drawn lies in slices
    Case("drops", "tp2", "selective"),
    Case("experts", "tp2", "sequence"),
    Case("odd-matrices", "tp2", "plain", "hooks"),  # gradients that are one tensor to autograd
    Case("bert", "pp2-dp2-zero3", "adamw", "calls"),  # a tied table, in no unit of FSDP2 that a call gathers
    Case("changed-arguments", "tp2", "recomputed"),  # what a forward changes, it changes once
    Case("changed-arguments", "pp2", "selective"),
    Case("habits", "tp2", "compiled"),
    Case("habits", "tp2", "selective"),
    Case("odd-matrices", "tp2", "selective"),  # what is read before and after its sum over ranks
    Case("table", "dp2-zero3"),  # a table that is gathered outside of its block
    Case("shifted-loss", "dp2-zero3"),
    *(Case("paths", f"dp2-zero{stage}") for stage in range(3)),  # gradients that come late, or of one replica alone
    Case("mlp", "dp2-zero2", "unseen", "changes-optimizers"),  # gradients that no optimizer had stay in parts
    Case("paths", "dp2-zero1", "small-buckets"),
    *(Case("functions", "dp2-zero3", *names) for names in (("bf16", "manual"), ("offloaded", "adversaries"))),
    *(Case(model, "cp2") for model in ("drops", "mixtral-grouped", "odd-gpt", "transposing", "ctc-mean", "whisper")),
    Case("gpt", "cp2", "resumed", "metrics"),
    Case("llama", "cp2", "bf16"),
    Case("mixtral", "cp2", "selective", "hooks"),
    Case("t5", "cp2-zero3", "recomputed", "by-hand"),
    Case("vit", "cp2", "clipped", "ema"),
    Case("gpt-oss", "cp4"),
    Case("llama", "cp4", "ring", "hooks"),
    Case("vit", "cp2", "ring", "metrics"),  # without a mask, and of a length that ranks do not divide
    Case("odd-gpt", "cp4", "head-tail", "by-hand"),
    Case("llama-one-kv-head", "dp2-cp2-zero3"),  # in a ring by itself
    Case("llama-one-kv-head", "cp2", "selective"),
    Case("gpt", "cp2", "gathered", "by-hand"),
    Case("gpt", "dp2-cp2-zero3", "folder", "metrics"),
    Case("gpt", "pp2-cp2", "resumed", "metrics"),
    Case("t5", "pp2-cp2"),  # whose loss code writes in place beside slices
    Case("gemma3n", "cp2-tp2"),  # blocks fill a dict for others
    Case("three-heads", "cp2-tp2"),  # tensor-parallel ranks with other shapes
    Case("llama", "cp2-tp2-zero3", "selective"),
    Case("gpt", "cp2-tp2-zero3", "whole-steps"),  # owners are among both axes and the replicas of state
    Case("flex-learned", "cp2-tp2"),  # what score functions capture gets gradients
    Case("odd-gpt", "pp2-tp2", "sequence-recomputed"),  # checkpoints inside of blocks save slices
)
"""Cases that are run though others cover their pairs."""

Pair = tuple[str, str, str, str]
"""Two kinds of rows and a name of each."""


def pairs(case: Case) -> list[Pair]:
    """What a case covers, see [Note: the cover]."""
    layout = LAYOUTS[case.layout]
    if layout.cp > 1:  # those that are pinned, and those of `make test-matrix`
        return []
    place = "more ranks" if layout.world_size > 2 else case.layout
    if layout.dp == 2 == layout.world_size and layout.zero < 3:
        place = "plain parameters"
    return [
        ("model", "family", case.model, family(case.layout)),
        ("setting", "layout", case.setting, place),
        ("habit", "layout", case.habit, place),
    ]


def said_of(case: Case, table: Mapping[str, str]) -> list[str]:
    """What a table says of a case, by patterns of names such as ``llama*.pp2.*``."""
    return [text for pattern, text in table.items() if fnmatchcase(str(case), pattern)]


def cover() -> list[Case]:
    """The cases that `make test` runs: those of the file whose rows are still there, and those where something was."""
    lines = [line.split(".") for line in FILE.read_text().split()]
    known = [names for names in lines if all(name in table for name, table in zip(names, TABLES, strict=True))]
    return sorted({*PINNED, *(Case(*names) for names in known)})


def wanted() -> set[Pair]:
    """All pairs that the cover has to have."""
    pool = [case for case in every_case() if MODELS[case.model].alike is None]
    return {
        pair for case in pool for pair in pairs(case) if pair[0] != "model" or pair[3] in MODELS[case.model].families
    }


def extended(cases: Iterable[Case]) -> list[Case]:
    """These cases, without those that are not allowed any more or cover nothing that others do not, and more for what
    they leave.
    """
    missing, found = wanted(), list[Case]()
    models: Counter[str] = Counter()

    def take(case: Case) -> None:
        found.append(case)
        models[case.model] += 1
        missing.difference_update(pairs(case))

    left = [case for case in cases if case.is_allowed]
    while left:
        best = max(left, key=lambda case: _gain(case, missing, models))
        if not missing.intersection(pairs(best)):
            break
        take(best)
        left.remove(best)
    by_pair: dict[Pair, list[Case]] = {}
    for case in sorted((case for case in every_case() if MODELS[case.model].alike is None), key=_order):
        for pair in pairs(case):
            if len(rows := by_pair.setdefault(pair, [])) < CONSIDERED:
                rows.append(case)
    while missing:
        take(max(by_pair[min(missing)], key=lambda case: _gain(case, missing, models)))
    return sorted(found)


def _order(case: Case) -> int:
    return zlib.crc32(str(case).encode())


def _gain(case: Case, missing: set[Pair], models: Counter[str]) -> tuple[float, int]:
    """New pairs by what they cost; then a model that has few cases yet."""
    return sum(pair in missing for pair in pairs(case)) / cost(case), -models[case.model]


@cache
def cost(case: Case) -> int:
    """Of all its ranks, relative to one that trains a small model at once: what takes most is planning."""
    layout, is_large = case.layout_row, _class_of(case.model_row.job) is HuggingFace
    compiled = 1 if layout.compile_backend is None else 4
    return layout.world_size * (1 + (layout.pp > 1)) * compiled * (1 + is_large) * (1 + case.setting_row.is_resumed)


def sample(seed: int, size: int) -> list[Case]:
    """Cases beside those of the cover."""
    covered, draw, found = set(cover()), random.Random(seed), dict[Case, None]()
    tables = [list(table) for table in (MODELS, LAYOUTS, SETTINGS, HABITS)]
    while len(found) < size:
        case = Case(*map(draw.choice, tables))
        if case not in covered and case.is_allowed:
            found[case] = None
    return list(found)


def named(pattern: str) -> list[Case]:
    """Cases by name, with `*` and `?` as in a shell: `llama*.pp2.bf16.*`."""
    parts = [*pattern.split("."), "*", "*", "*"][:4]
    names = [[name for name in table if fnmatchcase(name, part)] for table, part in zip(TABLES, parts, strict=True)]
    return [case for case in (Case(*chosen) for chosen in product(*names)) if case.is_allowed]


if __name__ == "__main__":
    FILE.write_text("".join(f"{case}\n" for case in extended(cover())))
