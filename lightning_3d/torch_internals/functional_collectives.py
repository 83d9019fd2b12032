"""Collectives that return new tensors, which tracing needs; those of ``torch.distributed`` write in place."""

from torch.distributed._functional_collectives import all_gather_single, all_reduce, reduce_scatter_single

__all__ = ["all_gather_single", "all_reduce", "reduce_scatter_single"]
