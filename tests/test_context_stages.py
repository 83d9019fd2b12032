"""Context parallel with pipelines: slices of sequences cross between stages."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from lightning_3d import ContextConfig, ThreeDStrategy
from lightning_3d.context.boundary import placement_between_stages, slice_between_stages
from lightning_3d.context.dims import SequenceDims
from lightning_3d.sharding.placement import Shard
from lightning_3d.trace.ghost import TensorMeta
from tests.models import TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools


def _bytes_between_stages(layout: Layout) -> tuple[int, int, int]:
    """What this rank sends in a step, of activations and of gradients, and what it sends of activations by the plan."""
    sent = Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("get_fwd_send_ops", "get_bwd_send_ops"):
            original = getattr(PipelineStage, name)

            def counting(
                self: PipelineStage, index: int, name: str = name, original: Any = original
            ) -> list[dist.P2POp]:
                operations: list[dist.P2POp] = original(self, index)
                sent[name] += sum(operation.tensor.nbytes for operation in operations)
                return operations

            patch.setattr(PipelineStage, name, counting)
        trainer, _ = fitted(layout, TinyGPT, batches=1, epochs=1, limit_val_batches=0)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    (stage,) = trainer.strategy.plan.stages_on(dist.get_rank() // (layout.world_size // 2))
    return sent["get_fwd_send_ops"], sent["get_bwd_send_ops"], 2 * trainer.strategy.plan.stages[stage].bytes_sent


@pytest.mark.parametrize("cp", [1, 2])
def test_each_rank_sends_its_slices(workers: WorkerPools, cp: int) -> None:
    own = 8 * 16 * 32 * 4 // cp  # bytes of (samples, tokens, features) of fp32 on a rank
    layout = Layout(pp=2, cp=cp, num_microbatches=2)
    assert workers(layout.world_size).run(_bytes_between_stages, layout) == [(own, 0, own)] * cp + [(0, own, 0)] * cp


class _Crosses(TinyGPT):
    """Embeddings of whole sequences cross between stages, slices that are read later alone, one of them changed in
    place there, one that lies across, and a mean; sequences are uneven, and shorter than ranks.
    """

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.blocks[0](self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1])))
        skip, across, mean = 1.0 * x, x.transpose(1, 2), x.mean(1)
        for block in self.blocks[1:]:
            x = block(x)
        x = skip.add_(x) + across.transpose(1, 2) + mean[:, None]
        logits: Tensor = self.head(self.norm(x))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        length = 1 if batch_idx == 1 else 9
        return super().training_step((batch[0][:, :length], batch[1][:, :length]), batch_idx)


def _trained(layout: Layout | None) -> dict[str, Tensor]:
    return whole_state(fitted(layout, _Crosses, batches=3, epochs=1)[0])


@pytest.mark.parametrize(
    "layout",
    [
        Layout(
            pp=2,
            cp=2,
            num_microbatches=4,
            schedule="interleaved",
            partition=("blocks.0", "blocks.2", "norm"),
            loss="whole",
        ),
        Layout(pp=2, cp=2, num_microbatches=4, schedule="zbv"),
        Layout(pp=2, cp=2, num_microbatches=2, zero=3, activations={"recompute": "full"}),
    ],
    ids=str,
)
def test_all_that_crosses_trains_as_one_process(workers: WorkerPools, layout: Layout) -> None:
    assert_same_state(workers(4).run(_trained, layout), _trained(None))


@pytest.mark.parametrize(
    ("shape", "dtype", "reader", "at", "own"),
    [
        ((2, 8, 4), torch.float32, "", Shard(1), [2, 2, 2, 2]),
        ((2, 7, 4), torch.bfloat16, "block", Shard(1, (2, 2, 2, 1)), [2, 2, 2, 1]),
        ((2, 5, 4), torch.float32, "", None, [5] * 4),  # the last rank would have none
        ((2, 8, 4), torch.int64, "", None, [8] * 4),
        ((2, 8), torch.float32, "block", None, [8] * 4),
        ((8, 2, 4), torch.float32, "late", Shard(0), [2, 2, 2, 2]),
        ((2, 4, 3, 8), torch.float32, "wide", Shard(3), [2, 2, 2, 2]),
    ],
)
def test_how_a_tensor_crosses_is_known_by_the_trace(
    shape: tuple[int, ...], dtype: torch.dtype, reader: str, at: Shard | None, own: list[int]
) -> None:
    dims = SequenceDims(ContextConfig(dims=(("late", 0), ("wide", 3))), ["block", "late", "wide"])
    meta = TensorMeta(shape=shape, dtype=dtype, device=torch.device("cpu"), requires_grad=False)
    trace: Any = SimpleNamespace(tensors=[meta], readers={0: reader})
    assert placement_between_stages(trace, 0, dims, 4) == at
    dim = 1 if at is None else at.dim
    assert [slice_between_stages(trace, 0, dims, 4, rank).shape[dim] for rank in range(4)] == own
