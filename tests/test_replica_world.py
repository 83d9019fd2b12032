"""What user code takes for the world: ``torch.distributed`` without a group goes over the replicas, in every layout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import all_reduce  # a name that nothing can be put under
from torch.distributed._functional_collectives import all_reduce as all_reduce_functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather as all_gather_with_gradients
from torch.distributed.nn.functional import all_reduce as all_reduce_with_gradients
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

from lightning_3d.errors import BatchError, StepError
from tests.models import TinyMLP, features
from tests.parity import QUIET, Layout, assert_same_state, devices, fitted, whole_state
from tests.workers import WorkerError, WorkerPools

Batch = tuple[Tensor, Tensor]

DDP = Layout(dp=2)
LAYOUTS = [Layout(dp=2, tp=2), Layout(dp=2, pp=2, mode="inline")]


def communicate(x: Tensor) -> list[Tensor]:
    """What each function makes of a tensor, (8,), of every replica."""
    rank, size = dist.get_rank(), dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    assert (dist.get_rank(world), dist.get_world_size(None), world.rank(), world.size()) == (rank, size, rank, size)
    summed, sent, reduced = x.clone(), x.clone(), x.clone()
    work = all_reduce(summed, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.broadcast(sent, src=1)
    dist.reduce(reduced, 0)
    listed, stacked, mine = [torch.empty_like(x) for _ in range(size)], x.new_empty(size * len(x)), x.new_empty(len(x))
    dist.all_gather(listed, x)
    dist.all_gather_into_tensor(stacked, x, group=dist.group.WORLD)
    dist.reduce_scatter_tensor(mine, stacked)
    swapped = torch.empty_like(x)
    dist.all_to_all_single(swapped, x.contiguous())
    everyone, told = [0.0] * size, [float(x.sum())]
    dist.all_gather_object(everyone, float(x[0]))
    dist.broadcast_object_list(told, src=0)
    received = torch.empty_like(x)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, ahead), dist.P2POp(dist.irecv, received, behind)]):
        request.wait()
    dist.barrier()
    functionally = all_reduce_functional(x, "sum", world.group_name) + 0
    last = reduced if rank == 0 else x
    return [summed, sent, last, *listed, stacked, mine, swapped, functionally, torch.tensor(everyone + told), received]


class Communicating(TinyMLP):
    """Compares samples with those of all replicas (OpenCLIP), and sums up loads and centres (DINO)."""

    loads: Tensor
    centre: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("loads", torch.zeros(4))
        self.register_buffer("centre", torch.zeros(4))
        self.seen: list[Tensor] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        outputs = self(batch[0])
        z = F.normalize(outputs - self.centre, dim=-1)
        everyone = torch.cat(all_gather_with_gradients(z))
        labels = torch.arange(len(z)) + dist.get_rank() * len(z)
        total = all_reduce_with_gradients(outputs.square().mean())
        loss: Tensor = F.cross_entropy(5 * z @ everyone.T, labels) + 0.1 * total / dist.get_world_size()
        loads = F.one_hot(outputs.argmax(-1), 4).float().sum(0)
        dist.all_reduce(loads)
        self.loads += loads
        centre = outputs.detach().mean(0)
        dist.all_reduce(centre)
        self.centre.mul_(0.9).add_(centre, alpha=0.1 / dist.get_world_size())
        self.seen += communicate(outputs.detach().flatten()[:8])
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen += communicate(self.seen[-1] + dist.get_rank())

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen += communicate(self(batch[0]).flatten()[:8])


def communicated(layout: Layout) -> tuple[int, dict[str, Tensor], list[Tensor]]:
    trainer, module = fitted(layout, Communicating, data=features, batches=3, epochs=1)
    assert isinstance(module, Communicating)
    ours: Any = trainer.strategy
    return ours.mesh.dp_rank, whole_state(trainer), module.seen


def communicated_in(layouts: list[Layout]) -> list[tuple[int, dict[str, Tensor], list[Tensor]]]:
    return [communicated(layout) for layout in layouts]


def test_collectives_without_a_group_are_over_the_replicas(workers: WorkerPools) -> None:
    alone = workers(2).run(communicated, DDP)
    for of_rank in workers(4).run(communicated_in, LAYOUTS):
        for replica, state, seen in of_rank:
            assert_same_state([state], alone[replica][1])
            torch.testing.assert_close(seen, alone[replica][2], atol=1e-5, rtol=1e-4)


class Grouping(TinyMLP):
    """Makes groups of ranks in a hook."""

    def on_train_start(self) -> None:
        for make in (lambda: dist.new_group([0, 1]), lambda: init_device_mesh("cpu", (dist.get_world_size(),))):
            with pytest.raises(StepError, match=r"was called by tests.test_replica_world, but in a pipeline or with"):
                make()


def grouped(layout: Layout) -> None:
    fitted(layout, Grouping, data=features, batches=1, epochs=1)


def test_groups_of_ranks_are_refused_where_ranks_are_replicas(workers: WorkerPools) -> None:
    workers(4).run(grouped, LAYOUTS[0])


class Shared(IterableDataset[Batch]):
    """Takes every n-th sample by itself: by the process group, as webdataset does, or by the environment."""

    def __init__(self, by: str) -> None:
        self.by = by

    def __iter__(self) -> Iterator[Batch]:
        if self.by == "group":
            rank, size = dist.get_rank(), dist.get_world_size()
        else:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for batch in range(first, 4, step):
            number = float(batch * size + rank)
            yield torch.full((2, 8), number), torch.full((2, 4), 0.1 * number)


class Sharing(TinyMLP):
    """Notes the samples that it gets, and what it sees around them."""

    def __init__(self, by: str, num_workers: int) -> None:
        super().__init__()
        self.by, self.num_workers, self.seen = by, num_workers, list[int]()

    def train_dataloader(self) -> DataLoader[Batch]:
        assert os.environ["RANK"] == str(dist.get_rank())
        context = "fork" if self.num_workers else None  # as on Linux; those of a pool would start a server first
        return DataLoader(
            Shared(self.by), batch_size=None, num_workers=self.num_workers, multiprocessing_context=context
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.seen.append(int(batch[0][0, 0]))
        assert int(os.environ["RANK"]) == self.trainer.global_rank
        return super().training_step(batch, batch_idx)


def samples_seen(layout: Layout, by: str, num_workers: int) -> list[int]:
    module = Sharing(by, num_workers)
    where = {**QUIET, **devices(layout), "max_epochs": 1, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=layout.strategy(), **where)
    trainer.fit(module)
    return module.seen


SHARED = [
    (Layout(dp=2, tp=2), "environment", 0),
    (Layout(dp=2, tp=2), "group", 2),
    (Layout(pp=2, dp=2), "environment", 2),
]


def samples_seen_in() -> list[list[int]]:
    return [samples_seen(*case) for case in SHARED]


def test_datasets_that_share_themselves_out_do_so_among_replicas(workers: WorkerPools) -> None:
    ranks = workers(4).run(samples_seen_in)
    for number, (layout, _, _) in enumerate(SHARED):
        for rank, seen in enumerate(ranks):
            replica = rank // layout.tp % 2
            assert seen[number] == [replica, 2 + replica, 4 + replica, 6 + replica], (layout, rank)


class Drifting(Dataset[tuple[Tensor, ...]]):
    """Draws other augmentation on each rank from a sample on."""

    def __init__(self, first: int) -> None:
        self.first, self.shift = first, float(os.environ["LOCAL_RANK"])

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        x = torch.full((8,), float(index)) + (self.shift if index >= self.first else 0)
        return x, x[:4]


def steps_until_told(first: int) -> tuple[int, str]:
    layout = Layout(tp=2)
    where = {**QUIET, **devices(layout), "max_epochs": 1, "enable_checkpointing": False}
    trainer = L.Trainer(strategy=layout.strategy(), **where)
    try:
        trainer.fit(TinyMLP(), DataLoader(Drifting(first), batch_size=8))
    except BatchError as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""


def test_batches_that_begin_to_differ_end_the_run_one_step_later(workers: WorkerPools) -> None:
    for first, steps in ((40, 6), (56, 8)):  # of the sixth batch of eight, and of the last
        for told_after, told in workers(2).run(steps_until_told, first):
            assert told_after == steps
            assert "of model replica 0 got different batches in the last step, whose update or result is wrong" in told


class Evaluated(TinyMLP):
    """Has all the steps."""

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self(batch[0])

    predict_step = test_step


def told_of_evaluations() -> list[str]:
    """What is said of the last batch of an evaluation alone, which differs."""
    told, data = list[str](), DataLoader(Drifting(56), batch_size=8)
    for name in ("validate", "test", "predict"):
        trainer = L.Trainer(strategy=Layout(tp=2).strategy(), **{**QUIET, **devices(Layout(tp=2))})
        with pytest.raises(BatchError) as raised:
            getattr(trainer, name)(Evaluated(), data)
        told.append(str(raised.value))
    return told


def test_the_last_batch_of_an_evaluation_is_compared(workers: WorkerPools) -> None:
    for told in workers(2).run(told_of_evaluations):
        assert all("replica 0 got different batches in the last step" in one for one in told)


class Stopping(TinyMLP):
    """Wants to stop by what one replica alone sees."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 1 and self.trainer.global_rank == 0:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


def stopping(layout: Layout) -> None:
    fitted(layout, Stopping, data=features, batches=6, epochs=1)


def test_one_rank_that_stops_alone_is_named(workers: WorkerPools) -> None:
    told = r"rank 0 came to the end of training, as by trainer.should_stop = True, .* Rank 1 has gone on without it"
    with pytest.raises(WorkerError, match=told):
        workers(2).run(stopping, DDP)


def resumed(batch_size: int) -> str:
    """Save after two of the batches of an epoch that two replicas share out, and go on with one."""
    data = features(48)
    where: dict[str, Any] = {**QUIET, "devices": 2, "enable_checkpointing": False, "use_distributed_sampler": False}
    first = L.Trainer(strategy=Layout(dp=2).strategy(), max_steps=2, **where)
    sampler: DistributedSampler[Any] = DistributedSampler(data, 2, dist.get_rank(), shuffle=False)
    first.fit(TinyMLP(), DataLoader(data, batch_size=4, sampler=sampler))
    first.save_checkpoint("two.ckpt")
    second = L.Trainer(strategy=Layout(tp=2).strategy(), max_epochs=1, **where)
    try:
        second.fit(TinyMLP(), DataLoader(data, batch_size=batch_size), ckpt_path="two.ckpt")
    except BatchError as error:
        return str(error)
    return f"{second.global_step} steps"


def test_other_samples_of_another_number_of_replicas_are_refused(workers: WorkerPools) -> None:
    assert workers(2).run(resumed, 8) == ["6 steps"] * 2
    for told in workers(2).run(resumed, 4):
        assert "by 2 replicas (8 samples a batch, in their order), but this run has 1 (4 samples a batch" in told
        assert "samples twice or never" in told
