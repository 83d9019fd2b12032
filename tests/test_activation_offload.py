"""Activations offloaded to host memory: order of the copies, lifetimes, and what is refused.

Whole models are in `test_second_device.py`.

Streams need an accelerator. Here copies that run as late as they may, from memory of the CPU to other memory of it,
take their place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_3d import ThreeDStrategy
from lightning_3d.activations.offload import Offload
from lightning_3d.activations.transfers import SideStreams, Transfer, Transfers
from lightning_3d.config.activations import ActivationsConfig, Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import ConfigError, OffloadError, StepError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.planning.plan import make_plan
from tests.models import TinyGPT
from tests.parity import QUIET

CPU = torch.device("cpu")
WIDTH = 32
NOISE = 0xFF
"""In every byte of memory that a copy has not reached yet, or that is done with: no number as float32."""


class LateCopy(Transfer):
    """A copy that runs when it is waited for."""

    def __init__(self, source: Tensor, done: Callable[[Tensor], None]) -> None:
        self._source: Tensor | None = source
        self._target, self._done = torch.full_like(source, NOISE), done

    def wait(self) -> Tensor:
        if self._source is not None:
            self._target.copy_(self._source)
            self._source = None
            self._done(self._target)
        return self._target


class LateCopies(Transfers):
    """Notes what is copied under the present label, and what of it is on the host."""

    def __init__(self) -> None:
        self.label = ""
        self.log: list[str] = []
        self.addresses: set[int] = set()
        """Where copied tensors lay."""
        self._labels: dict[int, str] = {}
        self._host: list[ref[Tensor]] = []

    @property
    def num_on_host(self) -> int:
        gc.collect()
        return sum(reference() is not None for reference in self._host)

    def to_host(self, tensor: Tensor) -> Transfer:
        self.addresses.add(tensor.data_ptr())
        label = self.label
        self.log.append(f"out {label}")

        def done(host: Tensor) -> None:
            self._labels[id(host)] = label
            self._host.append(ref(host))
            self.log.append(f"left {label}")

        return LateCopy(tensor, done)

    def to_device(self, tensor: Tensor) -> Transfer:
        label = self._labels[id(tensor)]
        self.log.append(f"back {label}")

        def done(device: Tensor) -> None:
            self.log.append(f"here {label}")

        return LateCopy(tensor, done)


class Mark(torch.autograd.Function):
    """Calls a function in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return gradient, None


class Inner(nn.Module):
    """(B, WIDTH) -> (B, WIDTH), by tensors that autograd saves several times, in views, and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH, WIDTH))
        self.scale: Tensor
        self.hidden: StorageWeakRef | None = None

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.first(x).sigmoid()
        self.hidden = StorageWeakRef(mixed.untyped_storage())
        q, k, v = mixed.chunk(3, dim=-1)
        spread = k.mean(0).expand(len(x), WIDTH)
        attended = torch.softmax(q @ k.transpose(0, 1), -1) @ (v * spread)
        output: Tensor = x + self.second(attended.t().contiguous().t() @ self.scale)
        return output


class Chain(nn.Module):
    """Blocks one after the other, each through an offload."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Inner() for _ in range(num_blocks))

    def run(self, x: Tensor, offload: Offload | None, copies: LateCopies) -> Tensor:
        for i, block in enumerate(self.blocks):
            copies.label = str(i)
            if offload is None:
                x = block(x)
            else:
                with offload.call(str(i), block):
                    x = block(x)
            x = Mark.apply(x, partial(copies.log.append, f"backward {i}"))  # type: ignore[no-untyped-call]
        return x


def _made(num_blocks: int = 3) -> tuple[Chain, Tensor, LateCopies, Offload]:
    torch.manual_seed(0)
    copies = LateCopies()
    return Chain(num_blocks), torch.randn(48, WIDTH, requires_grad=True), copies, Offload(CPU, copies, least_bytes=512)


def _gradients(chain: Chain, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(parameter.grad for parameter in chain.parameters())]
    chain.zero_grad()
    x.grad = None
    return [gradient for gradient in found if gradient is not None]


def _expected() -> list[Tensor]:
    chain, x, copies, _ = _made()
    chain.run(x, None, copies).square().sum().backward()  # type: ignore[no-untyped-call]
    return _gradients(chain, x)


def _assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) == 13
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---- order


def test_memory_of_the_device_goes_with_the_next_block_and_that_of_the_host_with_the_backward() -> None:
    chain, x, copies, offload = _made()
    loss = chain.run(x, offload, copies).square().sum()
    there = [not block.hidden.expired() for block in chain.blocks]  # type: ignore[union-attr,operator]
    assert there == [False, False, True]
    assert copies.num_on_host == copies.log.count("out 0") + copies.log.count("out 1")
    loss.backward()  # type: ignore[no-untyped-call]
    assert copies.num_on_host == 0
    assert chain.blocks[2].hidden.expired()  # type: ignore[union-attr,operator]
    _assert_equal(_gradients(chain, x), _expected())


# ---- what goes


def test_weights_and_buffers_stay_and_what_is_saved_often_is_copied_once() -> None:
    chain, x, copies, offload = _made(1)
    block = chain.blocks[0]
    output = chain.run(x, offload, copies)
    own = {tensor.data_ptr() for tensor in (*block.parameters(), *block.buffers())}
    assert not own & copies.addresses
    assert len(copies.log) == len(copies.addresses), "a storage is copied once"
    offload_of_large = Offload(CPU, large := LateCopies(), least_bytes=3 * 48 * WIDTH * 4)
    chain.run(x, offload_of_large, large)
    assert large.log == ["out 0"], "the largest tensor only: q, k and v"
    del output


class InPlace(nn.Module):
    """Changes a tensor that autograd has saved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.made: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.made = x * 2.0
        return self.made * self.weight


@pytest.mark.parametrize("width", [4, 4096], ids=["small", "large"])
def test_a_saved_tensor_that_is_changed_in_place_raises_as_ever(width: int) -> None:
    block, copies = InPlace(width), LateCopies()
    with Offload(CPU, copies, least_bytes=1024).call("block", block):
        output = block(torch.ones(width))
    block.made.view(-1).add_(1.0)
    assert len(copies.log) == (width > 4)
    with pytest.raises(RuntimeError, match="was changed in place after it was kept") as caught:
        output.sum().backward()
    assert isinstance(caught.value, StepError)
    output = block(torch.ones(width))
    block.made.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# ---- streams


def test_pinned_memory_that_runs_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patches:
        patches.setattr(torch, "Stream", lambda device: None)
        patches.setattr(torch, "empty_like", full)
        with pytest.raises(OffloadError, match=r"no room for 4,096 further bytes in pinned memory.*activations\.every"):
            SideStreams(CPU).to_host(torch.zeros(1024))


# ---- settings


def test_cpus_are_refused_before_anything_begins() -> None:
    with pytest.raises(ConfigError, match=r"activations.offload=True moves.*computes on the CPU \(device cpu\)"):
        L.Trainer(strategy=ThreeDStrategy(activations={"offload": True}), devices=1, **QUIET)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_plans_say_what_is_offloaded(recompute: Mode) -> None:
    config = ThreeDConfig(activations=ActivationsConfig(offload=True, recompute=recompute, every=2))
    module = TinyGPT()
    plan = make_plan(module, find_blocks(module), None, config, MeshShape(pp=1, dp=1, cp=1, tp=1), CPU)
    assert [block.fqn for block in plan.blocks if block.is_offloaded] == ["blocks.0", "blocks.2"]
    assert any(block.is_recomputed for block in plan.blocks) == (recompute == "full")
    console = Console(width=100)
    with console.capture() as capture:
        console.print(plan)
    assert "offloaded to host memory until the backward: blocks.0 .. 2 (2 x Block)" in capture.get()
