"""Samplers for ``samples_per_step``: each step has the same samples on any number of replicas.

The order of an epoch follows from a seed and its number, and replicas read it in strides. So with 6 samples a step, in
batches of one, three replicas accumulate two batches each, and two replicas three:

    order       a b c d e f | g h i j k l | ...
    of three    a d, b e, c f
    of two      a c e, b d f

An epoch has whole steps: the last one is filled up with the first samples, or dropped where the dataloader says
``drop_last=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from typing_extensions import override

from lightning_3d.errors import ConfigError


class StepSampler(DistributedSampler[Any]):
    """Shares out the samples of an epoch among replicas, in whole steps.

    Args:
        sampler: The Trainer's, which shares them out so that replicas have as many.
        samples_per_step: Of all replicas.
        shuffle: Whether they are shuffled, by a seed that is the same on all ranks.
        drop_last: Whether samples that make no step are left out.

    Raises:
        ConfigError: replicas would have different numbers of them, or there is no step.
    """

    def __init__(
        self, sampler: DistributedSampler[Any], samples_per_step: int, *, shuffle: bool, drop_last: bool
    ) -> None:
        vars(self).update(vars(sampler))
        num_samples = len(self.dataset)  # type: ignore[arg-type]  # it has been asked for it before
        num_steps = num_samples // samples_per_step if drop_last else -(-num_samples // samples_per_step)
        if samples_per_step % self.num_replicas or not num_steps:
            raise ConfigError(
                f"samples_per_step={samples_per_step} with {self.num_replicas} replicas and a dataset of"
                f" {num_samples} samples (drop_last={drop_last}): it must be a multiple of the number of replicas, and"
                " the dataset must have as many samples at least, or drop_last=False"
            )
        self.samples_per_step, self.shuffle, self.drop_last = samples_per_step, shuffle, drop_last
        self.total_size = num_steps * samples_per_step
        self.num_samples = self.total_size // self.num_replicas
        self.num_left_out = 0
        """Samples at the beginning of the next epoch that this replica has trained on before."""

    @override
    def __iter__(self) -> Iterator[Any]:
        first, self.num_left_out = self.num_left_out, 0
        return islice(super().__iter__(), first, None)


def in_whole_steps(loader: DataLoader[Any], sampler: object, samples_per_step: int) -> object:
    """The sampler for a training dataloader, in place of one that the Trainer would give it; of another kind, as the
    user's own that was wrapped, it stays.
    """
    if type(sampler) is not DistributedSampler:
        return sampler
    is_shuffled = sampler.shuffle and isinstance(loader.sampler, RandomSampler)
    return StepSampler(sampler, samples_per_step, shuffle=is_shuffled, drop_last=loader.drop_last)
