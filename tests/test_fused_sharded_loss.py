"""The loss without logits where tensor parallel shards the classes: as in one process, in chunks of own logits."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.tensor.axis import MeshAxis
from lightning_3d.tensor.collectives import enter
from lightning_3d.tensor.vocabulary import chunked_loss
from lightning_3d.tensor.vocabulary.head_call import HeadCall
from lightning_3d.tensor.vocabulary.lazy_logits import lazy_logits, made
from lightning_3d.tensor.vocabulary.loss import ShardedClasses
from lightning_3d.tensor.vocabulary.sharded_output import plain
from tests.test_fused_loss import (
    CLASSES,
    FLAT,
    FUSED,
    READ,
    WEIGHT,
    Compared,
    Use,
)
from tests.workers import WorkerPools

SMALL = patch.object(chunked_loss, "LEAST_LOGITS", 10)
"""A chunk has two rows of five classes."""


class Sharded(Compared):
    """One head, called as always, and lazily with this rank's classes."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> None:
        super().__init__(*shape, dtype=dtype, bias=bias)
        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
        self.axis, self.classes = MeshAxis(mesh), ShardedClasses(CLASSES, mesh)
        rows, *weights = self.leaves[1]
        start, stop = self.classes.bounds
        self.leaves[1] = [rows, *(w.detach()[start:stop].clone().requires_grad_() for w in weights)]

    def lazy(self) -> Tensor:
        rows, weight, *bias = self.leaves[1]
        entered = enter(rows, self.axis)
        self.call = HeadCall(
            entered, weight, bias[0] if bias else None, self.reads.append, self.classes, num_classes=CLASSES
        )
        return lazy_logits(self.call)

    def check(self, use: Use, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
        expected, result = use(self.dense()), plain(made(use(self.lazy())))
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol, equal_nan=True)
        if not expected.requires_grad:
            return
        seed = torch.linspace(0.5, 1.5, expected.numel()).reshape(expected.shape).to(expected.dtype)
        for leaf in (*self.leaves[0], *self.leaves[1]):
            leaf.grad = None
        expected.backward(seed)
        result.backward(seed)
        start, stop = self.classes.bounds
        for theirs, ours in zip(*self.leaves, strict=True):
            of_theirs = theirs.grad if ours is self.leaves[1][0] else theirs.grad[start:stop]
            torch.testing.assert_close(ours.grad, of_theirs, rtol=rtol, atol=atol, equal_nan=True)


@SMALL
def _as_dense() -> None:
    options = itertools.product(("mean", "sum", "none"), (0.0, 0.3), (None, WEIGHT), (-100, 5), (True, False))
    for reduction, smoothing, weight, ignored, bias in options:
        compared = Sharded(8, bias=bias)
        target = FLAT if ignored == -100 else FLAT.clamp(min=0)
        keywords: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "ignore_index": ignored}
        compared.check(lambda x: F.cross_entropy(x, target, weight, **keywords))  # noqa: B023
        if not keywords.pop("label_smoothing"):
            compared.check(lambda x: F.nll_loss(x.log_softmax(1), target, weight, **keywords))  # noqa: B023
        assert not compared.reads
    Sharded(8, dtype=torch.float64).check(lambda x: F.cross_entropy(x, FLAT))
    Sharded(8).check(lambda x: F.cross_entropy(x, torch.full((8,), -100)))  # NaN
    Sharded(8).check(lambda x: F.cross_entropy(x, torch.full((8,), -100), reduction="sum"))
    for number, use in enumerate((*FUSED, *READ)):
        if getattr(use, "__name__", "") != "_changed":  # planning keeps logits whole for steps that change them
            compared = Sharded(2, 4)
            compared.check(use)
            assert len(compared.reads) == (number >= len(FUSED) - 1), number


def test_every_option_and_every_use_is_as_in_one_process(workers: WorkerPools) -> None:
    workers(2).run(_as_dense)
