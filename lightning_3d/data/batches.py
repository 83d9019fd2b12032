"""A batch by example, for planning."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d.data.replay_iterator import ReplayIterator, is_used_up, restored
from lightning_3d.data.replica_environment import replica_environment
from lightning_3d.distributed.rng import random_states_kept
from lightning_3d.errors import BatchError
from lightning_3d.torch_internals.lightning_helpers import (
    active_loaders,
    change_loaders,
    fetched_ahead,
)


def example_batch(trainer: Trainer) -> object:
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
        change_loaders(trainer, lambda loader: ReplayIterator(loader) if is_used_up(loader) else loader)
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


def _first_batch(loader: Any) -> object:
    with restored(loader):
        return _fetched(loader)


def _fetched(loader: Any) -> object:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return next(iter(loader))
    indices = next(iter(loader.batch_sampler if loader.batch_sampler is not None else loader.sampler))
    if loader.batch_sampler is None:
        return loader.collate_fn(loader.dataset[indices])
    return loader.collate_fn([loader.dataset[index] for index in indices])
