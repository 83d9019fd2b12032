"""Random numbers in steps: which ranks draw the same, which others; recomputation draws them again, planning none."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.models import TinyMLP, features
from tests.parity import QUIET, Layout, fitted
from tests.workers import WorkerError, WorkerPools

WIDTH, NUM_BLOCKS, STEPS, BATCH = 32, 4, 3, 8
"""BATCH samples per replica and step."""

Recompute = Literal["nothing", "in blocks", "blocks"]
"""What torch.utils.checkpoint is used for: nothing, code inside of blocks, or whole blocks from glue."""


@dataclass
class Seen:
    """What one rank drew."""

    masks: dict[str, list[Tensor]] = field(default_factory=dict)
    """By block, in the order of the calls and recomputations."""
    noise: dict[tuple[int, ...], list[Tensor]] = field(default_factory=dict)
    """Glue's numbers by step and samples of the microbatch: of torch, NumPy and Python, and those drawn later."""
    order: list[int] = field(default_factory=list)
    """Samples in the order of the batches."""
    states: list[Any] = field(default_factory=list)
    """The process's own random states after training."""

    def note_mask(self, name: str, mask: Tensor) -> None:
        if not isinstance(mask, FakeTensor):
            local = mask.to_local() if isinstance(mask, DTensor) else mask
            self.masks.setdefault(name, []).append(local.detach().bool().clone())


class Noisy(nn.Module):
    """Two layers and dropout, (B, WIDTH) -> (B, WIDTH)."""

    def __init__(self, name: str, seen: Seen, recomputes: bool) -> None:
        super().__init__()
        self.name, self.seen, self.recomputes = name, seen, recomputes
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes:
            output: Tensor = checkpoint(self.compute, x, use_reentrant=False)
            return output
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        y = self.outer(F.gelu(self.inner(x)))
        mask = F.dropout(torch.ones_like(y), 0.5)
        self.seen.note_mask(self.name, mask)
        return x + y * mask


class Random(L.LightningModule):
    """Draws in blocks and in glue; a batch is `(features, sample)`."""

    def __init__(self, seen: Seen, recompute: Recompute) -> None:
        super().__init__()
        self.seen, self.recompute = seen, recompute
        self.blocks = nn.ModuleList(Noisy(f"block {i}", seen, recompute == "in blocks") for i in range(NUM_BLOCKS))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, samples = batch
        drawn = [torch.randn_like(x), torch.tensor(np.random.rand()), torch.tensor(random.random())]
        self.seen.noise[(self.global_step, *samples.tolist())] = drawn
        x = x + drawn[0]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute == "blocks" else block(x)
            x = F.dropout(x, 0.1)  # draws on the block's stage alone
            drawn.append(torch.rand(3))
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class _Order(L.Callback):
    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.masks.clear()  # drop those of the proof of tensor parallel

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.seen.order += batch[1].tolist()


def _fit(model: L.LightningModule, seen: Seen, replicas: int, shuffle: bool, **trainer_settings: Any) -> None:
    samples = STEPS * BATCH * replicas
    features = torch.arange(float(samples * WIDTH)).reshape(samples, WIDTH).sin()
    settings = {**QUIET, "use_distributed_sampler": not shuffle, "enable_checkpointing": False, **trainer_settings}
    trainer = L.Trainer(max_epochs=2 if shuffle else 1, callbacks=[_Order(seen)], **settings)
    dataset = TensorDataset(features, torch.arange(samples))
    trainer.fit(model, DataLoader(dataset, batch_size=BATCH, shuffle=shuffle))


def _train(layout: Layout, recompute: Recompute, seed: int, seeds_differ: bool, shuffle: bool) -> Seen:
    seen = Seen()
    own = seed + torch.distributed.get_rank() if seeds_differ else seed
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own)
    model = Random(seen, recompute)
    _fit(model, seen, layout.dp, shuffle, devices=layout.world_size, strategy=layout.strategy())
    seen.states = [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()]
    return seen


def _run(
    workers: WorkerPools,
    layout: Layout,
    *,
    recompute: Recompute = "nothing",
    seed: int = 1,
    seeds_differ: bool = False,
    shuffle: bool = False,
) -> list[Seen]:
    return workers(layout.world_size).run(_train, layout, recompute, seed, seeds_differ, shuffle)


_PIPELINE = Layout(pp=2, num_microbatches=2, partition="uniform", loss="mean")  # whose draws are each microbatch's own
PP2 = _PIPELINE
DP2 = Layout(dp=2)
PP2_DP2 = replace(_PIPELINE, dp=2)
TP2 = Layout(tp=2)
PP2_TP2 = replace(_PIPELINE, tp=2)


def _masks(seen: Seen) -> list[bytes]:
    return [mask.numpy().tobytes() for masks in seen.masks.values() for mask in masks]


def _num_calls(layout: Layout) -> int:
    """Of all blocks, on all ranks that are not copies of others."""
    num_microbatches = int(layout.num_microbatches) if layout.pp > 1 else 1
    return NUM_BLOCKS * STEPS * num_microbatches * layout.dp


def test_every_mask_differs_and_repeats_for_the_seed(workers: WorkerPools) -> None:
    first, second, other = (_run(workers, PP2_DP2, seed=seed) for seed in (1, 1, 2))  # neighbours must differ
    masks = [mask for seen in first for mask in _masks(seen)]
    assert len(masks) == _num_calls(PP2_DP2)
    assert len(set(masks)) == len(masks), "stages, replicas, microbatches or steps share masks"
    assert masks == [mask for seen in second for mask in _masks(seen)]
    assert not set(masks) & {mask for seen in other for mask in _masks(seen)}
    for one, two in zip(first, second, strict=True):
        _assert_same_noise(one, two)
    by_replica = first[::2], first[1::2]
    for one, two in by_replica:
        _assert_same_noise(one, two)
    noise = [tuple(float(t.flatten()[0]) for t in drawn[:3]) for seen, _ in by_replica for drawn in seen.noise.values()]
    assert len(noise) == STEPS * int(PP2_DP2.num_microbatches) * PP2_DP2.dp
    for values in zip(*noise, strict=True):  # of torch, of NumPy, of Python
        assert len(set(values)) == len(values), "replicas, microbatches or steps share noise"


@pytest.mark.parametrize(("layout", "recompute"), [(PP2, "in blocks"), (DP2, "blocks")], ids=str)
def test_recomputation_sees_the_same_masks(workers: WorkerPools, layout: Layout, recompute: Recompute) -> None:
    ranks = _run(workers, layout, recompute=recompute)
    times = Counter(mask for seen in ranks for mask in _masks(seen))
    assert set(times.values()) == {2}  # once in the forward, once in the backward
    assert len(times) == _num_calls(layout)


def _assert_same_noise(one: Seen, other: Seen) -> None:
    """As far as both drew: a stage leaves the step when it has sent what it made, and the last one looks at what comes
    to the blocks for the whole batch, too.
    """
    assert one.noise.keys() <= other.noise.keys()
    for key, drawn in one.noise.items():
        assert len(drawn) >= 3
        for mine, theirs in zip(drawn, other.noise[key], strict=False):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("layout", "seeds_differ"), [(TP2, False), (PP2_TP2, True)], ids=str)
def test_ranks_of_a_replica_shuffle_and_those_that_share_tensors_drop_alike(
    workers: WorkerPools, layout: Layout, seeds_differ: bool
) -> None:
    ranks = _run(workers, layout, shuffle=True, seeds_differ=seeds_differ)
    for first, second in zip(ranks[::2], ranks[1::2], strict=True):
        assert _masks(first)
        assert _masks(first) == _masks(second)
        _assert_same_noise(first, second)
    assert len(set(_masks(ranks[0]))) == len(_masks(ranks[0]))
    assert len(ranks[0].order) == 2 * STEPS * BATCH
    assert ranks[0].order[: STEPS * BATCH] != ranks[0].order[STEPS * BATCH :]
    for seen in ranks[1:]:
        assert seen.order == ranks[0].order
        assert all(_equal(mine, theirs) for mine, theirs in zip(seen.states, ranks[0].states, strict=True))


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


def test_replicas_keep_their_own_random_states(workers: WorkerPools) -> None:
    states = [seen.states for seen in _run(workers, PP2_DP2, seeds_differ=True)]
    assert all(_equal(mine, theirs) for mine, theirs in zip(states[0], states[2], strict=True))  # stages of replica 0
    assert not any(_equal(mine, theirs) for mine, theirs in zip(states[0], states[1], strict=True))


class OwnGenerators(TinyMLP):
    """Draws from generators of its own, before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.torch, self.numpy, self.python = torch.Generator(), np.random.default_rng(3), random.Random(4)
        self.system = random.SystemRandom()  # which has no state

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.torch)
        output: Tensor = super().forward(x + noise * self.python.random())
        return output * (self.numpy.random() + torch.rand((), generator=self.torch) + self.python.random())


def _own_numbers(layout: Layout) -> list[float]:
    """What a module's own generators draw after a run."""
    _, module = fitted(layout, OwnGenerators, data=features, epochs=1)
    assert isinstance(module, OwnGenerators)
    return [float(torch.rand((), generator=module.torch)), module.numpy.random(), module.python.random()]


def test_own_generators_of_a_module_draw_as_in_one_process(workers: WorkerPools) -> None:
    (expected,) = workers(1).run(_own_numbers, Layout())
    assert workers(2).run(_own_numbers, Layout(pp=2, mode="auto")) == [expected, expected]
    with pytest.raises(WorkerError, match="Modules hold random generators of their own"):
        workers(2).run(_own_numbers, Layout(pp=2))
