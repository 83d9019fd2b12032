"""The order in which replicas share out the samples of an epoch, as far as it is the same for other numbers of them."""

from __future__ import annotations

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_3d.data.step_sampler import StepSampler


def order_of(loader: object, num_replicas: int) -> str | None:
    """In words, which samples all replicas' batches number k have together; None where batches of another number of
    replicas may have others: of iterable datasets, own samplers, shuffled by one replica's generator.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset) or loader.batch_size is None:
        return None
    sampler: object = loader.sampler
    if isinstance(sampler, StepSampler):
        return f"{sampler.samples_per_step} samples a step, {_order(sampler)}"
    if type(sampler) is DistributedSampler:
        order = _order(sampler)
    elif type(sampler) is SequentialSampler:
        order = "in their order"
    else:
        return None
    return f"{loader.batch_size * num_replicas} samples a batch, {order}"


def _order(sampler: DistributedSampler[object]) -> str:
    return f"shuffled by the seed {sampler.seed}" if sampler.shuffle else "in their order"
