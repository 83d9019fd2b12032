"""Lightning's finetuning callbacks, where each rank holds a part of the model, and where a checkpoint is restored.

Before they give an optimizer parameters that were frozen, they leave out those whose values equal one that it has.
Ranks tell each other what the values of theirs are, so that all of them leave out the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor
from torch.optim import Optimizer

from lightning_3d.checkpoint.box import full_value
from lightning_3d.torch_internals.patches import replaced


@contextmanager
def finetuning_joined(pipeline: dist.ProcessGroup) -> Iterator[None]:
    """Let the callbacks compare parameters that lie in parts on several ranks."""
    original = BaseFinetuning.filter_on_optimizer

    def filter_on_optimizer(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        given = list(params)
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = _numbers([*held, *given], pipeline)
        alike: Any = object.__new__(type(optimizer))  # its type is told in a warning
        alike.param_groups = [{"params": numbers[: len(held)]}]
        stand_ins = numbers[len(held) :]
        kept = {id(number) for number in original(alike, stand_ins)}
        return [parameter for parameter, number in zip(given, stand_ins, strict=True) if id(number) in kept]

    with replaced("finetuning", BaseFinetuning, {"filter_on_optimizer": staticmethod(filter_on_optimizer)}):
        yield


def _numbers(tensors: Sequence[Tensor], pipeline: dist.ProcessGroup) -> list[Tensor]:
    """For each tensor a number, equal for those of equal values; every rank calls it."""
    own = [None if tensor.is_meta else _digest(tensor) for tensor in tensors]
    everyone = [own] * dist.get_world_size(pipeline)
    dist.all_gather_object(everyone, own, group=pipeline)
    digests = [next((digest for digest in found if digest is not None), None) for found in zip(*everyone, strict=True)]
    first = {digest: i for i, digest in reversed(list(enumerate(digests)))}
    return [torch.tensor(first[digest]) for digest in digests]


def _digest(tensor: Tensor) -> str:
    values = full_value(tensor.detach()).cpu().contiguous()
    return f"{tuple(values.shape)} {hashlib.sha256(values.view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()}"
