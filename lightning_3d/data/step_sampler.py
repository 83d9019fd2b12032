"""Samplers for ``samples_per_step``: each step has the same batches on any number of replicas.

The order of an epoch follows from a seed and its number, and replicas take its batches in turn. So with 12 samples a
step, in batches of two, three replicas accumulate two batches each, and two replicas three:

    order       ab cd ef gh ij kl | mn op ...
    of three    ab gh, cd ij, ef kl
    of two      ab ef ij, cd gh kl

An epoch has whole steps: the last one is filled up with the first samples, or dropped where the dataloader says
``drop_last=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from typing_extensions import override

from lightning_3d.errors import ConfigError


class StepSampler(DistributedSampler[Any]):
    """Shares out the batches of an epoch among replicas, in whole steps.

    Args:
        sampler: The Trainer's, which shares samples out so that replicas have as many.
        samples_per_step: Of all replicas.
        batch_size: Of a replica.
        shuffle: Whether samples are shuffled, by a seed that is the same on all ranks.
        drop_last: Whether samples that make no step are left out.

    Raises:
        ConfigError: batches of all replicas don't make such a step, or samples don't make one.
    """

    def __init__(
        self,
        sampler: DistributedSampler[Any],
        samples_per_step: int,
        *,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        super().__init__(sampler.dataset, sampler.num_replicas, sampler.rank, shuffle, sampler.seed, drop_last)
        check_samples_per_step(samples_per_step, batch_size, self.num_replicas)
        num_samples = len(self.dataset)  # type: ignore[arg-type]  # it has been asked for it before
        num_steps = num_samples // samples_per_step if drop_last else -(-num_samples // samples_per_step)
        if not num_steps:
            raise ConfigError(
                f"samples_per_step={samples_per_step} with a dataset of {num_samples} samples and drop_last=True: an"
                " epoch has no step. Use fewer samples in a step, or drop_last=False"
            )
        self.samples_per_step, self._batch_size = samples_per_step, batch_size
        self.total_size = num_steps * samples_per_step
        self.num_samples = self.total_size // self.num_replicas
        self.num_left_out = 0
        """Samples at the beginning of this epoch that this replica has trained on before."""

    @override
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.num_left_out = 0

    @override
    def __iter__(self) -> Iterator[Any]:
        num_samples, generator = len(self.dataset), torch.Generator()  # type: ignore[arg-type]  # as above
        generator.manual_seed(self.seed + self.epoch)
        order = torch.randperm(num_samples, generator=generator).tolist() if self.shuffle else range(num_samples)
        first, self.num_left_out = self.num_left_out, 0
        size = self._batch_size
        begins = range(self.rank * size, self.total_size, self.num_replicas * size)
        own = (order[place % num_samples] for begin in begins for place in range(begin, begin + size))
        return islice(own, first, None)


def check_samples_per_step(samples_per_step: int, batch_size: int, num_replicas: int) -> int:
    """The batches of each replica that make a step.

    Raises:
        ConfigError: none make one.
    """
    of_all = batch_size * num_replicas
    num, rest = divmod(samples_per_step, of_all)
    if rest:
        near = ", ".join(str(each * of_all) for each in (num, num + 1) if each)
        raise ConfigError(
            f"samples_per_step={samples_per_step} is no multiple of the {of_all} samples in a batch of {batch_size} on"
            f" each of {num_replicas} replicas: use {near}, another batch_size or another number of replicas"
        )
    return num


def in_whole_steps(loader: DataLoader[Any], sampler: object, samples_per_step: int) -> object:
    """The sampler for a training dataloader, in place of one that the Trainer would give it; of another kind, as the
    user's own that was wrapped, it stays.
    """
    if type(sampler) is not DistributedSampler or loader.batch_size is None:
        return sampler
    is_shuffled = sampler.shuffle and isinstance(loader.sampler, RandomSampler)
    return StepSampler(
        sampler, samples_per_step, batch_size=loader.batch_size, shuffle=is_shuffled, drop_last=loader.drop_last
    )
