"""Activations offloaded to host memory: what is copied, how long it lives, and what is refused.

Whole models, and copies on streams, are in `test_second_device.py`.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from weakref import ref

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d import ThreeDStrategy
from lightning_3d.activations.offload import Offload
from lightning_3d.activations.transfers import SideStreams, Wait
from lightning_3d.config.activations import ActivationsConfig, Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import ConfigError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.planning.observer import ExampleStep, Observation
from lightning_3d.planning.planner import decide
from tests.models import TinyGPT
from tests.parity import QUIET

CPU = torch.device("cpu")
WIDTH = 32


class Copies(SideStreams):
    """Notes what is copied to the host, and which of it is still there."""

    def __init__(self) -> None:
        self.addresses: list[int] = []
        self._host: list[ref[Tensor]] = []

    @property
    def num_on_host(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self._host)

    def to_host(self, tensor: Tensor) -> Wait:
        self.addresses.append(tensor.data_ptr())
        copy = tensor.clone()
        self._host.append(ref(copy))
        return lambda: copy

    def to_device(self, tensor: Tensor) -> Wait:
        copy = tensor.clone()
        return lambda: copy


class Inner(nn.Module):
    """(B, WIDTH) -> (B, WIDTH), by tensors that autograd saves several times, in views."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH, WIDTH))
        self.hidden: StorageWeakRef | None = None

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.first(x).sigmoid()
        self.hidden = StorageWeakRef(mixed.untyped_storage())
        q, k, v = mixed.chunk(3, dim=-1)
        output: Tensor = x + self.second(torch.softmax(q @ k.transpose(0, 1), -1) @ v @ self.scale)
        return output


def test_memory_of_the_device_goes_with_the_next_block_and_that_of_the_host_with_the_backward() -> None:
    blocks, x, copies = [Inner() for _ in range(3)], torch.randn(48, WIDTH), Copies()
    offload, plain, output = Offload(CPU, copies, least_bytes=512), x, x
    for block in blocks:
        plain = block(plain)
        with offload.call(block):
            output = block(output)
    weights = [parameter for block in blocks for parameter in block.parameters()]
    expected = torch.autograd.grad(plain.sum(), weights)
    assert [not block.hidden.expired() for block in blocks] == [False, False, True]  # type: ignore[union-attr]
    assert copies.num_on_host > 0
    found = torch.autograd.grad(output.sum(), weights)
    assert copies.num_on_host == 0
    assert blocks[2].hidden.expired()  # type: ignore[union-attr]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_weights_and_buffers_stay_and_what_is_saved_often_is_copied_once() -> None:
    block, copies = Inner(), Copies()
    with Offload(CPU, copies, least_bytes=512).call(block):
        output = block(torch.randn(48, WIDTH))
    assert not {tensor.data_ptr() for tensor in (*block.parameters(), *block.buffers())} & {*copies.addresses}
    assert len(copies.addresses) == len({*copies.addresses}) > 3
    del output


# ---- settings


def test_cpus_are_refused_before_anything_begins() -> None:
    with pytest.raises(ConfigError, match=r"activations.offload=True moves.*computes on the CPU \(device cpu\)"):
        L.Trainer(strategy=ThreeDStrategy(activations={"offload": True}), devices=1, **QUIET)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_plans_say_what_is_offloaded(recompute: Mode) -> None:
    config = ThreeDConfig(activations=ActivationsConfig(offload=True, recompute=recompute, every=2))
    module = TinyGPT()
    step = ExampleStep(name="training_step", microbatch=None, modes=nullcontext)
    observed = Observation(module=module, blocks=find_blocks(module), step=step, trace=None)
    plan = decide(observed, config, MeshShape(pp=1, dp=1, cp=1, tp=1), CPU)
    assert [block.fqn for block in plan.blocks if block.is_offloaded] == ["blocks.0", "blocks.2"]
    assert any(block.is_recomputed for block in plan.blocks) == (recompute == "full")
    console = Console(width=100)
    with console.capture() as capture:
        console.print(plan)
    assert "offloaded to host memory until the backward: blocks.0 .. 2 (2 x Block)" in capture.get()
