"""Steps that microbatches can't run, at first or at any time: they are undone on all ranks, and run inline."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from tests.architectures import Trained
from tests.models import features
from tests.parity import Job, Layout, assert_parity, ran, run_layout
from tests.tables import some_in_matrix
from tests.workers import WorkerError, WorkerPools

Trouble = Literal["leaves", "raises", "raises backward", "other head", "one replica"]
WIDTH = 16


class Troubled(Trained):
    """At some of its steps, which no trace tells, it does what can't be done on parts of a batch.

    Args:
        at: The batches, by number.
        full: Samples of a batch.
    """

    def __init__(self, trouble: Trouble, at: frozenset[int], full: int) -> None:
        super().__init__()
        self.inlet, self.head, self.other = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.trouble, self.at, self.full, self.number = trouble, at, full, 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.number += 1

    def on_after_backward(self) -> None:
        """Changes what has accumulated so far, which is to be there, summed over all ranks."""
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(1 + parameter.grad.abs().max())

    def compute_loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        now = self.trouble if self.number in self.at and self.training else None
        x = self.inlet(batch[0])
        for i, layer in enumerate(self.layers):
            if i != 1 or now != "leaves":
                x = (x + layer(x)) * self.scale
        part = len(x) < self.full
        if part and (now == "raises" or (now == "one replica" and batch[0].sum() > 0)):
            raise ArithmeticError("half a batch")
        if part and now == "raises backward":
            x.register_hook(_fail)
        return F.mse_loss((self.other if now == "other head" else self.head)(x), batch[1])


def _fail(gradient: Tensor) -> None:
    raise ArithmeticError("half a gradient")


def _job(trouble: Trouble, at: set[int], dp: int = 1, **settings: Any) -> Job:
    return Job(model=partial(Troubled, trouble, frozenset(at), 8 // dp), data=features, steps=4, **settings)


PP = Layout(pp=2, mode="auto")
CASES: dict[str, tuple[Trouble, set[int], Layout, dict[str, Any]]] = {
    "first": ("leaves", {0}, PP, {}),
    "later": ("leaves", {1}, PP, {}),
    "twice": ("raises", {1, 2}, PP, {"gradient_clip_val": 0.1}),
    "backward": ("raises backward", {1}, PP, {}),
    "head": ("other head", {2}, PP, {}),
    "accumulated": ("raises", {1, 4}, PP, {"accumulate_grad_batches": 2}),
    "interleaved": ("raises", {1}, replace(PP, schedule="interleaved"), {}),
    "split backward": ("raises backward", {1}, replace(PP, schedule="interleaved_zero_bubble"), {}),
    "zbv": ("leaves", {1}, replace(PP, schedule="zbv", loss="whole"), {}),
    "tensor parallel": ("leaves", {1}, Layout(pp=2, mode="auto", tp=2), {}),
    **{
        f"zero {z}": ("raises", {1}, Layout(pp=2, mode="auto", dp=2, zero=z), {"accumulate_grad_batches": 2})
        for z in (0, 1, 2, 3)
    },
    **{f"replica {z}": ("one replica", {1}, Layout(pp=2, mode="auto", dp=2, zero=z), {}) for z in (0, 1, 2, 3)},
}

ALWAYS = {"twice", "backward", "accumulated", "split backward", "replica 1", "replica 3"}


@pytest.mark.parametrize("name", some_in_matrix(CASES, lambda name: name not in ALWAYS))
def test_a_step_that_fails_in_microbatches_runs_inline(workers: WorkerPools, name: str) -> None:
    trouble, at, layout, settings = CASES[name]
    job = _job(trouble, at, layout.dp, **settings)
    ranks = run_layout(workers, job, layout)
    assert_parity(job, ranks)
    is_final = 0 in at or len(at) > 1
    assert [(outcome.plan.inline is not None) for outcome in ranks if outcome.plan] == [is_final] * len(ranks)


def test_replicas_that_gather_again_end(workers: WorkerPools) -> None:
    layout = Layout(pp=2, mode="auto", dp=2, zero=3, zero_settings={"reshard_after_forward": True})
    with pytest.raises(WorkerError, match=r"(?s)half a batch.*zero\.reshard_after_forward=True replicas wait"):
        workers(4).run(ran, _job("one replica", {1}, 2), layout)


# ------------------------------------------------------------------------------------------------------ from the start


def ragged(num_samples: int) -> Dataset[tuple[Tensor, ...]]:
    """Words, (6,) int64 of which 0 and 1 are the first two, how many of them count, and targets, (4,)."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(2, 32, (num_samples, 6), generator=generator)
    words[:, :2] = torch.arange(2)
    sizes = torch.randint(3, 7, (num_samples,), generator=generator)
    return TensorDataset(words, sizes, torch.randn(num_samples, 4, generator=generator))


class Reader(Trained):
    """Reads words; the mean over samples of an error."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def compute_loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return F.mse_loss(self.read(*batch[:2]), batch[2])

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        return self.head(self.through(self.words(words)).mean(1))  # type: ignore[no-any-return]


class Unpadded(Reader):
    """All words of a batch come one after the other, as attention without padding has them."""

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        x = self.words(words[torch.arange(words.shape[1]) < sizes[:, None]])
        return self.head(self.through(x)[sizes.cumsum(0) - 1])  # type: ignore[no-any-return]


class OneByOne(Reader):
    """Takes the batch apart after the blocks."""

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        x = self.through(self.words(words))
        return self.head(torch.stack([row[:size].mean(0) for row, size in zip(x, sizes.tolist(), strict=True)]))  # type: ignore[no-any-return]


class Jagged(Reader):
    """Blocks take jagged nested tensors."""

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        rows = [row[:size] for row, size in zip(self.words(words), sizes.tolist(), strict=True)]
        x = self.through(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
        return self.head(torch.stack([row.mean(0) for row in x.unbind()]))  # type: ignore[no-any-return]


class RandomSizes(Reader):
    """Brings a batch to a size that it draws, as detectors do with pictures."""

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        return super().read(words[:, torch.arange(random.randint(2, 100)) % 6], sizes)


class Scattering(Reader):
    """Puts what a tower gives, but for its first position, in place of some words, and reads the others' errors."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(nn.Sequential(nn.Linear(4, WIDTH), nn.Linear(WIDTH, 4)) for _ in range(2))
        self.widen = nn.Linear(4, WIDTH)

    def compute_loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        words, sizes, targets = batch
        seen = torch.stack([row.repeat(3, 1) for row in self.tower[0](targets)])
        seen = seen + self.tower[1](seen)
        x = self.words(words).masked_scatter(words[..., None] < 2, self.widen(seen[:, 1:]))
        counts = torch.arange(words.shape[1]) < sizes[:, None]
        return F.mse_loss(self.head(self.through(x))[counts], targets[:, None].expand(-1, 6, -1)[counts])


class Hyper(Reader):
    """A net writes the weights of another one, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.written = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh())
        self.pen = nn.Linear(WIDTH, 4 * WIDTH + 4)

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        x = self.through(self.words(words)).mean(1)
        weight, bias = self.pen(x).split([4 * WIDTH, 4], dim=1)
        weights = {"0.weight": weight.unflatten(1, (4, WIDTH)), "0.bias": bias}
        run = lambda given, row: torch.func.functional_call(self.written, given, (row,))  # noqa: E731
        return torch.func.vmap(run)(weights, x)


class OneBlock(Trained):
    """All layers are in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(32, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))
        self.cells = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def compute_loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        return F.mse_loss(F.linear(self.cells(self.table[batch[0]])[0][:, -1], self.out), batch[2])


class Remembering(Reader):
    """A hidden state goes on from batch to batch, which has no rows for a part of one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.zeros(8, WIDTH)

    def read(self, words: Tensor, sizes: Tensor) -> Tensor:
        x = self.through(self.words(words).mean(1) + 0.5 * self.hidden[: None if self.training else len(words)])
        self.hidden = x.detach()
        return self.head(x)  # type: ignore[no-any-return]


class Scaling(Reader):
    """Changes its batch in place, and at a later step takes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def on_train_batch_end(self, *args: Any) -> None:
        self.number += 1

    def compute_loss(self, batch: tuple[Tensor, ...]) -> Tensor:
        batch[2].mul_(0.5)
        x = self.through(self.words(batch[0]).mean(1))
        return F.mse_loss(self.head(self.layers[0](x) if self.number == 1 else x), batch[2])


PROGRAMS: dict[str, tuple[type[Trained], str | None]] = {
    "unpadded": (Unpadded, "don't make up"),
    "one by one": (OneByOne, "other calls for the whole batch"),
    "jagged": (Jagged, "can't be traced"),
    "random sizes": (RandomSizes, "took another path"),
    "scattering": (Scattering, "as one that takes a batch apart into its samples"),
    "hyper": (Hyper, "runs inside"),
    "one block": (OneBlock, "only 1 calls of blocks"),
    "remembering": (Remembering, "RuntimeError"),
    "scaling": (Scaling, None),
}
"""Program -> why it has come to run inline, in part; None if it runs in microbatches."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_microbatches_cannot_run_runs_inline(workers: WorkerPools, name: str) -> None:
    program, why = PROGRAMS[name]
    job = Job(model=program, data=ragged)
    ranks = run_layout(workers, job, PP)
    assert_parity(job, ranks)
    for outcome in ranks:
        assert outcome.plan is not None
        assert (outcome.plan.inline is None) == (why is None)
        assert why is None or why in str(outcome.plan.inline)
