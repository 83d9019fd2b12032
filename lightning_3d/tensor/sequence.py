"""Sequence-parallel regions of a block: norms, dropout and residuals work on a slice of the sequence.

A block's input is cut along its sequence, every rank keeps one slice, and each all-reduce becomes a reduce-scatter
after a row weight and an all-gather before a column weight (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198).
The result of the all-gather is not kept for the backward, which gathers again.

    x ---> slice ---> norm ---> all-gather ---> column ... row ---> reduce-scatter ---> + ---> all-gather ---> y
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Shard, chunked
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.torch_internals.autograd import is_checkpointing, is_in_backward, when_backward_ends
from lightning_3d.torch_internals.capture import is_captured, recomputed_when_compiled
from lightning_3d.torch_internals.tensors import storage_id

SEQUENCE_DIM = 1
"""The dim of the sequence in activations of shape (B, T, D)."""


def cut_sequence(args: tuple[object, ...], axis: Axis) -> tuple[tuple[Any, ...], torch.Size | None]:
    """The arguments of a block with the first cut along its sequence, if it is (B, T, D) and each rank gets some of T.

    Returns:
        The arguments, and the full shape of what is cut; None if nothing is.
    """
    first = args[0] if args else None
    if not _is_sequence(first) or first.shape[SEQUENCE_DIM] < axis.size:
        return args, None
    along = along_sequence(first.shape, axis)
    own = redistribute(first, axis, REPLICATE, along)
    own = own if first.requires_grad else own.clone()  # so that nothing retains the rest of it
    return (ShardedTensor(own, axis, along), *args[1:]), first.shape


def along_sequence(sequence: torch.Size, axis: Axis) -> Shard:
    """How activations (B, T, D) lie along the sequence of a block's input of this shape."""
    return chunked(SEQUENCE_DIM, sequence[SEQUENCE_DIM], axis.size)


def _is_sequence(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def is_along(tensor: Tensor, sequence: torch.Size | None) -> bool:
    """Whether a tensor of full shape (B, T, ...) lies along the sequence of a block's input of shape `sequence`."""
    return sequence is not None and tensor.dim() == 3 and tensor.shape[:2] == sequence[:2]


class GatheredSequence:
    """An activation gathered for column weights, which the backward gathers again rather than keep it, compiled or not.

    Args:
        local: This rank's slice, (B, T / size, D).
        axis: The axis that the sequence is cut over.
        along: How it is cut.
    """

    def __init__(self, local: Tensor, axis: Axis, along: Shard) -> None:
        kind = local.device.type
        if torch.is_autocast_enabled(kind):  # as linear would with the whole; so less is sent, and linear keeps no copy
            local = local.to(torch.get_autocast_dtype(kind))
        self._is_captured = is_captured(local)
        with recomputed_when_compiled() if self._is_captured else nullcontext():
            self.whole = redistribute(local, axis, along, REPLICATE_PARTIAL_GRAD, saves=False)
        """(B, T, D)."""
        self._slice = _Slice(local.detach(), self.whole, axis, along)

    def not_saved(self) -> AbstractContextManager[Any]:
        """Calls made inside keep the slice for their backward in place of the whole; under a checkpoint neither."""
        if self._is_captured or is_checkpointing():
            return nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(self._slice.pack, self._slice.unpack)


class _Slice:
    """Stands for a gathered activation in the graph, which may outlive that.

    Args:
        local: This rank's slice.
    """

    def __init__(self, local: Tensor, whole: Tensor, axis: Axis, along: Shard) -> None:
        self._local, self._axis, self._along, self._whole = local, axis, along, weakref.ref(whole)
        self._storage = storage_id(whole.untyped_storage())
        self._again: Tensor | None = None
        self._num_saved = self._num_left = 0
        self._is_expected = False

    def pack(self, saved: Tensor) -> Any:
        """Keep the shape of what has the memory of the whole."""
        whole = self._whole()
        assert whole is not None, "it is there while calls read it"
        if storage_id(saved.untyped_storage()) != self._storage or saved.numel() != whole.numel():
            return saved
        self._num_saved += 1
        if not self._is_expected and whole.requires_grad:
            self._is_expected = True
            self._axis.expect_backward(whole, whole, REPLICATE, self._along)  # gathers it, as that of a cut
        return saved.shape

    def unpack(self, packed: Any) -> Tensor:
        """The whole again, gathered once in a backward for all that kept it, however often and far it runs."""
        if isinstance(packed, Tensor):
            return packed
        again = self._again
        if again is None:
            again = self._axis.all_gather(self._local, self._along)
            if is_in_backward():
                self._again, self._num_left = again, self._num_saved
                when_backward_ends(self._forget)
        self._num_left -= 1
        if self._num_left == 0:  # all that read it have run their backward
            self._forget()
        return again.view(packed)

    def _forget(self) -> None:
        self._again = None
