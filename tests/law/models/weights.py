"""Weights that users change by others, or lay out, in ways of their own: momentum encoders, memory formats."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests import architectures as a
from tests.law.models.row import Model
from tests.models import features
from tests.parity import Job, Layout

Follow = Callable[[list[nn.Parameter], list[nn.Parameter]], None]
"""Moves the parameters of a teacher towards those of its student."""


class Mixer(nn.Module):
    """A block that tensor parallel shards, with a norm that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


def _assign(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
    for mine, theirs in zip(teacher, student, strict=True):
        mine.data = mine.data * 0.5 + theirs.data * 0.5


def _change(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
    for mine, theirs in zip(teacher, student, strict=True):
        mine.data.mul_(0.5).add_((1 - 0.5) * theirs.data)


def _lerp(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
    torch._foreach_lerp_([p.data for p in teacher], [p.data for p in student], 0.5)


def _copy(teacher: list[nn.Parameter], student: list[nn.Parameter]) -> None:
    with torch.no_grad():
        halves = torch._foreach_add(torch._foreach_mul(teacher, 0.5), torch._foreach_mul(student, 0.5))
        torch._foreach_copy_(teacher, halves)


class Teachers(a.Trained):
    """Follows teachers that average its weights in its steps, each in a way of its own, and in a hook."""

    ways: tuple[Follow, ...] = (_assign, _change, _lerp, _copy)
    ways_between: tuple[Follow, ...] = ways

    def __init__(self) -> None:
        super().__init__()
        self.student, self.head = nn.Sequential(Mixer(), Mixer()), nn.Linear(8, 4)
        self.teachers = nn.ModuleList(copy.deepcopy(self.student) for _ in (*self.ways, *self.ways_between))
        self.averaged = AveragedModel(self.student, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.teachers.requires_grad_(False)
        self.averaged.requires_grad_(False)

    def follow(self, ways: tuple[Follow, ...], teachers: nn.ModuleList) -> None:
        for way, teacher in zip(ways, teachers, strict=True):
            way(list(teacher.parameters()), list(self.student.parameters()))

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.training:
            self.follow(self.ways, self.teachers[: len(self.ways)])
            self.averaged.update_parameters(self.student)
        with torch.no_grad():
            taught = torch.stack([teacher(batch[0]) for teacher in (*self.teachers, self.averaged)])
        x = self.student(batch[0] * 0.9)
        return F.mse_loss(self.head(x), batch[1]) + F.mse_loss(x.expand_as(taught), taught)

    def on_train_batch_start(self, batch: object, batch_idx: int) -> None:
        self.follow(self.ways_between, self.teachers[len(self.ways) :])


class TeachersElsewhere(Teachers):
    """They are on other pipeline stages than their student, whose weights they get between steps as they are."""

    ways_between = (_assign, _lerp, _copy)


class Formats(a.Trained):
    """Convolutions of the memory format ``channels_last``, and a table that is the transpose of what it was made of."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Conv2d(2, 8, 2, padding=1), nn.GELU(), nn.Conv2d(8, 8, 2), nn.Flatten(), nn.Linear(32, 6))
        self.layers = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.table = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6).t())

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        images = batch[0].view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
        return F.mse_loss(self.layers(images) @ self.table, batch[1])


class _Penalty:
    """An object with weights, as users have them for terms of a loss."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = [(weight, 0.1) for weight in weights]

    def __call__(self) -> Tensor:
        return torch.stack([factor * weight.abs().mean() for weight, factor in self.weights]).sum()


class Referring(a.Trained):
    """Its loss reads weights of its layers by containers that it made of them, and constants that are not its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(Mixer(), Mixer(), Mixer()), nn.Linear(8, 4)
        self.scales = [nn.Parameter(torch.linspace(0.8, 1.2, 4)), nn.Parameter(torch.tensor(0.9))]
        self.balanced = {"first": self.layers[0].up.weight, "last": (self.layers[2].up.weight, "of the last")}
        self.penalty = _Penalty([layer.down.weight for layer in self.layers])
        self.decayed = set(self.head.parameters())

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        output = self.head(self.layers(batch[0])) * self.scales[0] * self.scales[1]
        apart = (self.balanced["first"] - self.balanced["last"][0]).square().mean()
        return F.mse_loss(output, batch[1]) + 0.5 * apart + self.penalty()

    def on_train_start(self) -> None:
        assert sum(parameter in self.decayed for parameter in self.parameters()) == len(self.decayed)


def _in_parts(layout: Layout) -> bool:
    """Where others take the place of parameters."""
    return layout.pp > 1 or layout.tp > 1 or layout.zero == 3


def _without_pipelines(layout: Layout) -> bool:
    """Between the steps of a pipeline weights change by those of another stage, but not by what was made of them."""
    return layout.pp == 1


MODELS = {
    "teachers": Model(
        job=Job(model=Teachers, data=features, num_val_batches=1),
        fits=_without_pipelines,
        families=frozenset({"tp", "dp"}),
        skips=frozenset({"early", "thawing"}),
    ),
    "teachers-elsewhere": Model(
        job=Job(model=TeachersElsewhere, data=features, num_val_batches=1),
        runs_inline=True,
        families=frozenset({"pp"}),
        skips=frozenset({"early", "thawing"}),
    ),
    "referring": Model(
        job=Job(model=Referring, data=features, num_val_batches=1),
        families=frozenset({"pp", "tp", "dp"}),
        fits=_in_parts,
    ),
    "formats": Model(job=Job(model=Formats, data=features, num_val_batches=1), families=frozenset({"pp", "tp", "dp"})),
}
