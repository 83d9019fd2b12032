"""Batches: an example for planning, and the check that all ranks of a replica hold the same one."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d.config.settings import BatchConfig
from lightning_3d.data.peeking import Peeked, is_used_up, undisturbed
from lightning_3d.data.replica_environment import replica_environment
from lightning_3d.distributed.agreement import gather_numbers
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.objects import broadcast_object
from lightning_3d.distributed.rng import random_states_kept
from lightning_3d.errors import BatchError
from lightning_3d.pipeline.microbatches import leaves_of
from lightning_3d.torch_internals.lightning_helpers import (
    active_loaders,
    change_loaders,
    fetched_ahead,
)

_START_STEPS = 4  # steps that check="start" compares


def example_batch(trainer: Trainer) -> Any:
    """The first batch of the loop that is about to run, fetched without disturbing its dataloader or random numbers.

    A map-style dataset is read in this process, without starting dataloader workers.

    Raises:
        BatchError: there is no batch.
    """
    loaders = active_loaders(trainer)
    if loaders is None:
        raise BatchError(
            "Cutting the model into stages or tensor-parallel shards takes an example batch, but there is no dataloader"
            f" for trainer.{trainer.state.fn.value if trainer.state.fn else 'fit'}(), or its number of batches is"
            " limited to 0. Give it one, or use pipeline_parallel_size=1 and tensor_parallel_size=1."
        )
    if trainer.state.fn == TrainerFn.FITTING and (ahead := fetched_ahead(trainer)):
        return ahead[0]
    if any(map(is_used_up, loaders.flat)):
        change_loaders(trainer, lambda loader: Peeked(loader) if is_used_up(loader) else loader)
        loaders = active_loaders(trainer)
        assert loaders is not None
    try:
        with random_states_kept(), replica_environment(trainer):
            if loaders.is_sequential:
                return _first_batch(loaders.flat[0])
            return loaders.structured([_first_batch(loader) for loader in loaders.flat])
    except StopIteration:
        raise BatchError(
            "A dataloader is empty, so there is no example batch to cut the model into stages or tensor-parallel shards"
            " with. It needs at least one batch for each data-parallel rank (mind drop_last=True)."
        ) from None


def _first_batch(loader: Any) -> Any:
    with undisturbed(loader):
        return _fetched(loader)


def _fetched(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return next(iter(loader))
    indices = next(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler))
    if loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[indices])
    return loader.collate_fn([loader.dataset[index] for index in indices])


class BatchGuard:
    """Keeps the ranks of a replica on the same batch.

    Args:
        config: When to compare, and whether to broadcast.
        mesh: Its replica group is compared.
        device: Where the checksum is sent from.
    """

    def __init__(self, config: BatchConfig, mesh: Mesh, device: torch.device) -> None:
        self._config, self._mesh, self._device = config, mesh, device
        self._num_checked = 0
        self._replica_size = mesh.shape.world_size // mesh.shape.dp

    def __call__(self, batch: Any) -> Any:
        """Broadcast or compare as configured; every rank calls it with its batch.

        Raises:
            BatchError: on all ranks, if two ranks of a replica hold different batches.
        """
        if self._replica_size == 1:
            return batch
        if self._config.broadcast:
            return self._broadcast(batch)
        if self._config.check == "always" or (self._config.check == "start" and self._num_checked < _START_STEPS):
            self._num_checked += 1
            self._compare(batch)
        return batch

    def _broadcast(self, batch: Any) -> Any:
        source = self._mesh.shape.replica_ranks(self._mesh.dp_rank)[0]
        return broadcast_object(batch, self._device, src=source, group=self._mesh.group("replica"))

    def _compare(self, batch: Any) -> None:
        sums = gather_numbers(checksum(batch))
        for dp in range(self._mesh.shape.dp):
            ranks = self._mesh.shape.replica_ranks(dp)
            if len({sums[rank] for rank in ranks}) > 1:
                listed = ", ".join(f"rank {rank}: {sums[rank]:08x}" for rank in ranks)
                raise BatchError(
                    f"The ranks of model replica {dp} got different batches (checksums {listed}), but pipeline"
                    " and tensor parallel ranks work on one batch together. Make the dataset, its random augmentation"
                    " and its shuffling depend on the data-parallel rank only (a sampler of your own:"
                    " DistributedSampler(dataset, **trainer.distributed_sampler_kwargs)), or set batch.broadcast=true"
                    " to send the first rank's batch to the others."
                )


def checksum(batch: Any) -> int:
    """A number that differs if a leaf of the batch differs: CRC-32 of the bytes of tensors, and of other values."""
    value = 0
    for path, leaf in leaves_of(batch):
        value = zlib.crc32(path.encode(), value)
        if isinstance(leaf, Tensor):
            value = zlib.crc32(leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data, value)
        elif isinstance(leaf, (str, bytes, int, float, bool, type(None))):
            value = zlib.crc32(repr(leaf).encode(), value)
    return value
