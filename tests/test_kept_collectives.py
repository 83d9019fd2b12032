"""Collectives of tensor parallel in blocks that keep the results of costly operators: made once, and never wrongly."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.distributed.rng import Generators
from lightning_3d.planning.memory.block_memory import measure_memory
from lightning_3d.planning.memory.live_bytes import LiveBytes
from lightning_3d.tensor import apply_block, plan_block
from lightning_3d.tensor.axis import MeshAxis
from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.trace.ghost import TensorMeta
from tests.models import Block, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

CPU = torch.device("cpu")


class Dropping(TinyGPT):
    """With dropout in blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.3))  # type: ignore[union-attr,operator]


def _made(layout: Layout, modes: Sequence[str]) -> list[tuple[dict[str, Tensor], Counter[str]]]:
    """State and collectives of a fit."""
    found = []
    for mode in modes:
        made: Counter[str] = Counter()

        def counted(name: str, made: Counter[str] = made) -> Callable[..., Tensor]:
            present = vars(MeshAxis)[name]

            def call(*args: Any) -> Tensor:
                made[name] += 1
                result: Tensor = present(*args)
                return result

            return call

        names = ("all_reduce", "all_gather", "reduce_scatter")
        with attributes_replaced(MeshAxis, {name: counted(name) for name in names}):
            trainer, _ = fitted(
                replace(layout, activations={**layout.activations, "recompute": mode}), Dropping, epochs=1
            )
        found.append((whole_state(trainer), made))
    return found


def test_a_fit_makes_as_many_collectives_as_without_recomputation(workers: WorkerPools) -> None:
    for (expected, made), full, selective in workers(2).run(_made, Layout(tp=2), ["none", "full", "selective"]):
        assert made["all_reduce"] > 0
        assert_same_state([full[0], selective[0]], expected)
        assert selective[1] == made
        assert sum(full[1].values()) > sum(made.values())


# ---- memory


def _kept_bytes() -> tuple[int, int]:
    """Bytes that a recomputed block keeps beside its input, predicted and measured."""
    torch.manual_seed(0)
    mesh, block, shape = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Block(32, 4), (2, 8, 32)
    plan = plan_block(block, (torch.randn(shape),), {}, size=2, sequence_parallel=True)
    inputs = ((TensorMeta.of(torch.empty(shape, device="meta").requires_grad_()),), {})
    storages = measure_memory(block, inputs, CPU, plan).kept
    assert storages is not None
    apply_block(block, plan, mesh)
    recomputed = Recomputation("block", block, "selective", Generators(CPU))
    x = torch.randn(shape, requires_grad=True)
    recomputed(block, (x,), {})  # the first call finds out what the block does
    predicted = sum(storage.num_bytes for storage in storages.inner if storage.is_costly)
    with LiveBytes() as live:
        output = recomputed(block, (x,), {})
        gc.collect()
        end = time.monotonic() + 5.0
        while live.live - output.nbytes > predicted and time.monotonic() < end:
            time.sleep(0.01)  # threads of gloo let go of a collective's tensors a moment after it has ended
        return predicted, live.live - output.nbytes


def test_blocks_keep_what_is_planned(workers: WorkerPools) -> None:
    activation = 4 * 2 * 8 * 32
    # q, k, v, attention with its logsumexp, and up, four times as wide, on this rank; slices of out and down.
    expected = 8 * activation // 2 + 4 * 2 * 2 * 8 + 2 * activation // 2
    assert workers(2).run(_kept_bytes) == [(expected, expected)] * 2
