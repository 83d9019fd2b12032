"""The loss without logits: heads fused with their cross entropy give what they give apart, and logits stay readable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from benchmarks.measured_memory import AllocatedPeak
from lightning_3d import ThreeDStrategy
from lightning_3d.errors import PlanError
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import REPLICATE, REPLICATE_PARTIAL_GRAD
from lightning_3d.tensor.vocabulary import chunked_loss
from lightning_3d.tensor.vocabulary.head_call import HeadCall
from lightning_3d.tensor.vocabulary.lazy_tensor import lazy_logits, made
from lightning_3d.tensor.vocabulary.sharded_classes import ShardedClasses, shard_bounds
from tests.law.models.heads import Shifted
from tests.models import TinyGPT, TinyMLP, features, loader, tokens
from tests.parity import QUIET, Job, Layout, assert_parity, assert_same_state, devices, fitted, run_layout, whole_state
from tests.workers import WorkerPools

CLASSES, WIDTH = 10, 5

Use = Callable[[Tensor], Any]


SMALL = patch.object(chunked_loss, "LEAST_LOGITS", 10)
"""A chunk has a row of all classes, or two of those of a rank."""


class Compared:
    """One head, called as always and lazily."""

    own = slice(None)
    """Of the classes."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        head = nn.Linear(WIDTH, CLASSES, bias=bias)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(torch.rand(parameter.shape, generator=generator) - 0.5)
        head = head.to(dtype)
        rows = torch.randn(*shape, WIDTH, generator=generator).to(dtype)
        self.leaves = [
            [rows.clone().requires_grad_(), *(p.detach().clone().requires_grad_() for p in head.parameters())]
        ]
        self.leaves.append([leaf.detach().clone().requires_grad_() for leaf in self.leaves[0]])
        self.reads: list[str] = []

    def dense(self) -> Tensor:
        return F.linear(*self.leaves[0])

    def lazy(self) -> Tensor:
        leaves = self.leaves[1]
        bias = leaves[2] if leaves[2:] else None
        self.call = HeadCall(leaves[0], leaves[1], bias, self.reads.append, num_classes=CLASSES)
        return lazy_logits(self.call)

    def check(self, use: Use, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        """``use`` gives the same values and gradients of both."""
        expected, result = use(self.dense()), made(use(self.lazy()))
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)
        if not expected.requires_grad:
            return
        seed = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape).to(expected.dtype)
        for leaf in (*self.leaves[0], *self.leaves[1]):
            leaf.grad = None
        expected.backward(seed)
        result.backward(seed)
        for theirs, ours in zip(*self.leaves, strict=True):
            wanted = theirs.grad if ours is self.leaves[1][0] else theirs.grad[self.own]
            torch.testing.assert_close(ours.grad, wanted, rtol=rtol, atol=atol, equal_nan=True)


class Sharded(Compared):
    """One head, called as always, and lazily with this rank's classes."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        super().__init__(*shape, dtype=dtype, bias=bias)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
        self.axis = MeshAxis(mesh)
        self.classes = ShardedClasses(CLASSES, self.axis)
        rows, *weights = self.leaves[1]
        self.own = slice(*shard_bounds(CLASSES, mesh))
        self.leaves[1] = [rows, *(weight.detach()[self.own].clone().requires_grad_() for weight in weights)]

    def lazy(self) -> Tensor:
        rows, weight, *bias = self.leaves[1]
        entered = redistribute(rows, self.axis, REPLICATE, REPLICATE_PARTIAL_GRAD)
        self.call = HeadCall(
            entered, weight, bias[0] if bias else None, self.reads.append, self.classes, num_classes=CLASSES
        )
        return lazy_logits(self.call)


FLAT = torch.tensor([0, 9, 3, -100, 5, 6, 1, 2])
TARGETS = FLAT.view(2, 4)
WEIGHT = torch.linspace(0.1, 1.0, CLASSES)


FUSED: list[Use] = [
    lambda x: F.cross_entropy(x.flatten(0, 1), FLAT),
    lambda x: F.cross_entropy(x.reshape(-1, x.size(-1)).float(), FLAT),
    lambda x: F.cross_entropy(x.reshape((8, x.shape[-1])).to(torch.float64), FLAT),
    lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS),
    lambda x: F.cross_entropy(x.transpose(-1, -2).contiguous(), TARGETS, label_smoothing=0.2),
    lambda x: F.cross_entropy(x[..., :-1, :].contiguous().view(-1, CLASSES), TARGETS[:, 1:].flatten()),
    lambda x: F.cross_entropy(x[:, 0], TARGETS[:, 0]),
    lambda x: F.cross_entropy(x[TARGETS > 2], TARGETS[TARGETS > 2]),
    lambda x: F.cross_entropy((torch.tanh(x / 3) * 3).flatten(0, 1), FLAT, WEIGHT),
    lambda x: F.cross_entropy((2 * x).float().tanh().flatten(0, 1), FLAT, reduction="none"),
    lambda x: nn.CrossEntropyLoss(ignore_index=5)(x.view(8, CLASSES).clone(), FLAT.clamp(min=0)),
    lambda x: F.cross_entropy(x.flatten(0, 1), FLAT, reduction="none").mul_(FLAT > 2),
    lambda x: F.cross_entropy(x.flatten(0, 1), FLAT) + F.cross_entropy(x[0], TARGETS[0], reduction="sum"),
    lambda x: F.cross_entropy(x[:, 0], TARGETS[:, 0]) * F.cross_entropy(x[:, 1], TARGETS[:, 1]),
    lambda x: nn.NLLLoss(WEIGHT, ignore_index=5, reduction="sum")(nn.LogSoftmax(1)(x.view(8, -1)), FLAT.clamp(min=0)),
    lambda x: F.nll_loss(x.log_softmax(-1).transpose(1, 2), TARGETS, reduction="none"),
    lambda x: F.nll_loss(torch.log_softmax(x.float() / 0.7, dim=2)[:, :-1].flatten(0, 1), TARGETS[:, 1:].flatten()),
    lambda x: F.nll_loss(F.log_softmax(x.tanh(), -1, dtype=torch.float32).double().flatten(0, 1), FLAT),
    lambda x: F.cross_entropy(x.log_softmax(-1).flatten(0, 1), FLAT, label_smoothing=0.1),
    lambda x: F.cross_entropy(x[:0].flatten(0, 1), FLAT[:0], reduction="sum") + F.cross_entropy(x[1], TARGETS[1]),
]


def _with_entropy(logits: Tensor) -> Tensor:
    logs = logits.log_softmax(-1)
    return F.nll_loss(logs.flatten(0, 1), FLAT) - 0.1 * (logs.exp() * logs).sum(-1).mean()


def _changed(logits: Tensor) -> Tensor:
    view = logits[:, 1:]
    logits[..., 0] = -1.0
    logits.mul_(2)
    return F.cross_entropy(logits.flatten(0, 1), FLAT) + view.sum()


READ: list[Use] = [
    lambda x: checkpoint(lambda y: y.sin().exp(), x, use_reentrant=False),
    lambda x: x.argmax(-1),
    lambda x: x[..., 2:5],
    lambda x: -x.log_softmax(-1).gather(-1, TARGETS.clamp(min=0).unsqueeze(-1)),
    lambda x: F.nll_loss(x.log_softmax(1).flatten(0, 1), FLAT),
    _with_entropy,
    lambda x: F.ctc_loss(
        x.log_softmax(-1), torch.tensor([[1], [2], [3], [1]]), torch.full((4,), 2), torch.ones(4).long()
    ),
    lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((8, CLASSES), 0.1)),
    lambda x: F.cross_entropy(x, torch.zeros(2, CLASSES, dtype=torch.int64)),
    lambda x: x.detach(),
    lambda x: x * torch.linspace(0, 1, CLASSES),
    lambda x: x[0] + x,
    lambda x: F.cross_entropy(x.flatten(0, 1), FLAT) + 0.1 * x.logsumexp(-1).square().mean(),
    _changed,
]


@SMALL
def _as_of_logits(kind: type[Compared]) -> None:
    """Every option, and every use: the first make no logits, and for the others the head runs once."""
    options = itertools.product(("mean", "sum", "none"), (0.0, 0.3), (None, WEIGHT), (-100, 5), (True, False))
    for reduction, smoothing, weight, ignored, bias in options:
        compared = kind(8, bias=bias)
        target = FLAT if ignored == -100 else FLAT.clamp(min=0)
        keywords: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        compared.check(lambda x: F.cross_entropy(x, target, weight, **keywords))  # noqa: B023
        if not keywords.pop("label_smoothing"):
            compared.check(lambda x: F.nll_loss(x.log_softmax(1), target, weight, **keywords))  # noqa: B023
        assert not compared.reads
    kind(8, dtype=torch.float64).check(lambda x: F.cross_entropy(x, FLAT))
    kind(8).check(lambda x: F.cross_entropy(x, torch.full((8,), -100)))  # NaN
    kind(8).check(lambda x: F.cross_entropy(x, torch.full((8,), -100), reduction="sum"))
    kind(8).check(lambda x: F.cross_entropy(x, FLAT, torch.zeros(CLASSES), label_smoothing=0.3))  # NaN
    for number, use in enumerate((*FUSED, *READ)):
        compared = kind(2, 4)
        try:
            compared.check(use)
        except AssertionError as error:
            error.add_note(f"use {number}")
            raise
        assert len(compared.reads) == (number >= len(FUSED) - 1), number


def test_losses_are_those_of_logits_in_one_process() -> None:
    _as_of_logits(Compared)


def test_losses_are_those_of_logits_on_shards_of_the_classes(workers: WorkerPools) -> None:
    workers(2).run(_as_of_logits, Sharded)


@SMALL
def test_half_precision() -> None:
    """The fused gradients are as near to fp32's as those of logits."""
    target = torch.arange(64) % CLASSES
    for use in (lambda x: F.cross_entropy(x, target), lambda x: F.nll_loss(F.log_softmax(x, -1), target)):
        exact, mixed, fused = Compared(64), Compared(64), Compared(64)
        F.cross_entropy(exact.dense(), target).backward()
        with torch.autocast("cpu", torch.bfloat16):
            losses = [use(mixed.dense()), use(fused.lazy())]
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
        for loss in losses:
            loss.backward()
        for true, apart, ours in zip(exact.leaves[0], mixed.leaves[0], fused.leaves[1], strict=True):
            assert (true.grad - ours.grad).norm() <= 1.5 * (true.grad - apart.grad).norm() + 1e-3 * true.grad.norm()
    Compared(64, dtype=torch.bfloat16).check(lambda x: F.cross_entropy(x, target), rtol=0.03, atol=2e-3)


def test_losses_in_regions_of_autocast_round_no_gradients_of_heads_outside() -> None:
    def use(logits: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(logits, FLAT)

    Compared(8).check(use)


def test_gradients_of_gradients_are_refused() -> None:
    compared = Compared(8)
    loss = F.cross_entropy(compared.lazy(), FLAT)
    with pytest.raises(PlanError, match=r"create_graph=True: .* activations\.fused_loss='never'"):
        torch.autograd.grad(loss, compared.leaves[1][0], create_graph=True)


def test_logits_never_exist() -> None:
    """The graph keeps neither logits nor anything of their size."""
    compared = Compared(64)
    sizes: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (sizes.append(x.numel()), x)[1], lambda x: x):
        F.cross_entropy(compared.lazy(), torch.zeros(64, dtype=torch.int64))
    assert max(sizes) <= 64 * WIDTH


def test_rows_go_with_the_backward() -> None:
    leaf, weight, bias = Compared(64).leaves[1]
    rows = leaf * 1
    storage = StorageWeakRef(rows.untyped_storage())
    loss = F.cross_entropy(
        lazy_logits(HeadCall(rows, weight, bias, list[str]().append, num_classes=CLASSES)),
        torch.zeros(64, dtype=torch.int64),
    )
    del rows
    assert not storage.expired()
    loss.backward()
    assert storage.expired(), "though the loss is still there"


# ------------------------------------------------------------------------------------------------------- training


class Reading(TinyGPT):
    """Does more with its logits than to compute a loss, or hooks its head."""

    def __init__(self, way: str) -> None:
        super().__init__(tied=False)
        self.way, self.seen = way, list[float]()
        if way == "hooked":
            self.head.register_forward_hook(lambda module, args, output: output / 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        logits, targets = self(batch[0]), batch[1]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if self.way == "accuracy" or (self.way == "accuracy at times" and batch_idx == 1):
            self.seen.append((logits.argmax(-1) == targets).float().mean().item())
        more: dict[str, Callable[[], Tensor]] = {
            "twice": lambda: F.cross_entropy(logits[:, 1:].flatten(0, 1), targets[:, :-1].flatten()),
            "read": lambda: 0.01 * logits.logsumexp(-1).square().mean(),
        }
        loss = loss + more[self.way]() if self.way in more else loss
        return {"loss": loss, "logits": logits} if self.way == "returned" else loss

    def on_before_backward(self, loss: Tensor) -> None:
        if isinstance(self.trainer.strategy, ThreeDStrategy) and self.trainer.world_size > 1:
            assert isinstance(self.head.weight, DTensor), "no longer gathered"

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.way == "returned":
            self.seen.append(outputs["logits"].square().mean().item())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        pass


FUSED_LINE = "head: fused with its cross entropy, without logits"
ALONE, GATHERED = Layout(), Layout(dp=2, zero=3)
READS = "head: makes logits, as the step reads logits"
OUTCOMES = {
    "alone": (
        ALONE,
        {"accuracy": READS, "returned": READS, "accuracy at times": FUSED_LINE},
    ),
    "gathered": (
        GATHERED,
        {
            "twice": FUSED_LINE,
            "hooked": "head: makes logits, as it has hooks",
            "read": f"{READS}: logsumexp",
        },
    ),
}
"""A layout, and what the plan says of the head by what the step does."""


def _read(layout: Layout | None, ways: Sequence[str]) -> list[tuple[dict[str, Tensor], list[float], str]]:
    """By way, the trained state, what was seen, and what became of the head."""
    found = []
    for way in ways:
        trainer, model = fitted(layout, partial(Reading, way), batches=3, epochs=1)
        assert isinstance(model, Reading)
        plan = trainer.strategy.plan if isinstance(trainer.strategy, ThreeDStrategy) else None
        found.append((whole_state(trainer), model.seen, plan.findings.heads[0] if plan else ""))
    return found


@pytest.mark.parametrize("name", OUTCOMES)
def test_logits_that_the_step_reads_are_those_of_the_head(workers: WorkerPools, name: str) -> None:
    layout, lines = OUTCOMES[name]
    expected = _read(None, [*lines])
    for ranks in workers(layout.world_size).run(_read, layout, [*lines]):
        for (way, text), (state, seen, line), (wanted, wanted_seen, _) in zip(
            lines.items(), ranks, expected, strict=True
        ):
            assert_same_state([state], wanted)
            assert seen == pytest.approx(wanted_seen, rel=1e-5), way
            assert line.startswith(text), way


ELSEWHERE = (
    "its pipeline stage fuses it with its cross entropy, unless the step reads logits or waits for their gradient"
)
LINES: list[tuple[Any, Layout, str]] = [
    (TinyGPT, Layout(tp=2), FUSED_LINE),
    (Shifted, Layout(pp=2), f"head: {ELSEWHERE}"),
    (
        TinyGPT,
        Layout(pp=2, activations={"recompute": "full", "blocks": ["head"]}),
        "head: makes logits, as its backward computes it again (activations.recompute)",
    ),
]


def _lines(model: Any, layout: Layout) -> tuple[str, ...]:
    trainer, _ = fitted(layout, model, batches=1, epochs=1, limit_val_batches=0)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return trainer.strategy.plan.findings.heads


@pytest.mark.parametrize(("model", "layout", "line"), LINES)
def test_plans_tell_what_becomes_of_heads(workers: WorkerPools, model: Any, layout: Layout, line: str) -> None:
    assert workers(2).run(_lines, model, layout)[0] == (line,)


class Projecting(TinyMLP):
    """A layer as wide as a head before a block, whose hooks, FSDP2's, read it by an autograd function of their own."""

    def __init__(self) -> None:
        super().__init__(width=16)
        self.first = nn.Linear(8, 8)
        self.layers[0], self.layers[1] = nn.Linear(8, 32), nn.Sequential(nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x).tanh())


def test_layers_as_wide_as_heads_go_into_blocks_at_stage_3(workers: WorkerPools) -> None:
    job = Job(model=Projecting, data=features)
    assert_parity(job, run_layout(workers, job, Layout(pp=2, dp=2, zero=3)))


class Validated(TinyGPT):
    """Many classes, and a validation that asks for nothing but its loss."""

    def __init__(self) -> None:
        super().__init__(vocabulary=2**18, num_layers=1, tied=False)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("val_loss", F.cross_entropy(self(inputs).flatten(0, 1), targets.flatten()))


class Peak(L.Callback):
    """Of a batch, in bytes."""

    def on_validation_batch_start(self, *_: Any) -> None:
        self.allocated = AllocatedPeak()
        self.allocated.start()

    def on_validation_batch_end(self, *_: Any) -> None:
        self.num_bytes = self.allocated.stop()


def _peak() -> int:
    peak = Peak()
    layout = Layout(pp=2, num_microbatches=2)
    trainer = L.Trainer(strategy=layout.strategy(), callbacks=peak, **{**QUIET, **devices(layout)})
    trainer.validate(Validated(), loader(tokens(8), global_batch_size=8, data_parallel_size=1), verbose=False)
    return peak.num_bytes


def test_validation_of_a_loss_alone_makes_no_logits_in_a_pipeline(workers: WorkerPools) -> None:
    logits = 8 * 16 * 2**18 * 4  # bytes, of 8 samples of 16 tokens
    assert max(workers(2).run(_peak)) < logits / 2
