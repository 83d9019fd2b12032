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


def test_blocks_leave_one_behind_and_come_back_one_ahead() -> None:
    chain, x, copies, offload = _made()
    chain.run(x, offload, copies).square().sum().backward()  # type: ignore[no-untyped-call]
    log = copies.log

    def first(entry: str) -> int:
        return log.index(entry)

    def last(entry: str) -> int:
        return len(log) - 1 - log[::-1].index(entry)

    assert last("out 0") < first("out 1") < last("out 1") < first("left 0")
    assert last("left 0") < first("out 2") < last("out 2") < first("left 1")
    assert not {"left 2", "back 2"} & {*log}, "the last block's is there"
    assert first("backward 2") < first("back 1") <= last("back 1") < first("backward 1") < first("here 1")
    assert first("backward 1") < first("back 0") <= last("back 0") < first("backward 0") < first("here 0")
    for name in "01":
        assert log.count(f"out {name}") == log.count(f"left {name}") == log.count(f"back {name}")
    _assert_equal(_gradients(chain, x), _expected())


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


def test_each_microbatch_of_a_stage_has_the_next_one_fetched() -> None:
    chain, x, copies, offload = _made(2)
    losses = []
    for microbatch in "abc":
        offload.begin_forward(0)
        losses.append(chain.run(x * 1.0, offload, copies).square().sum())
        copies.log.append(f"ran {microbatch}")
    other, y, *_ = _made(1)
    offload.begin_forward(1)  # of another stage, in between
    copies.label = "other"
    with offload.call("other", other.blocks[0]):
        between = other.blocks[0](y)
    copies.log.clear()
    for loss in losses:
        loss.backward()  # type: ignore[no-untyped-call]
        copies.log.append("end")
    ends = [i for i, entry in enumerate(copies.log) if entry == "end"]
    first, second, third = copies.log[: ends[0]], copies.log[ends[0] : ends[1]], copies.log[ends[1] : ends[2]]
    assert first.index("backward 1") < first.index("back 1"), "nothing came before it"
    assert "back 1" in first[first.index("backward 0") :], "what the next backward needs first"
    assert "back 1" not in second[: second.index("backward 0")]
    assert "back 1" in second
    assert "back 1" not in third
    assert "back other" not in copies.log
    del between


# ---- lifetimes


def test_nothing_stays_of_graphs_without_a_backward() -> None:
    chain, x, copies, offload = _made()
    output = chain.run(x, offload, copies)
    assert copies.num_on_host > 0
    del output
    assert copies.num_on_host == 0
    assert all(block.hidden.expired() for block in chain.blocks)  # type: ignore[union-attr,operator]
    copies.log.clear()
    with torch.no_grad():
        chain.run(x, offload, copies)
    assert copies.log == []
    del x
    output = chain.run(torch.randn(4, WIDTH), Offload(CPU, copies), copies)
    assert copies.log == [], "all are small"
    del output
    assert all(block.hidden.expired() for block in chain.blocks)  # type: ignore[union-attr,operator]


class Broken(Exception):
    """Raised on purpose."""


def _raise() -> None:
    raise Broken


def _train(chain: Chain, x: Tensor, copies: LateCopies, offload: Offload) -> None:
    chain.run(x, offload, copies).square().sum().backward()  # type: ignore[no-untyped-call]
    _assert_equal(_gradients(chain, x), _expected())


def test_nothing_stays_after_an_exception() -> None:
    chain, x, copies, offload = _made()
    handle = chain.blocks[1].register_forward_hook(lambda module, args, output: _raise())
    with pytest.raises(Broken):
        chain.run(x, offload, copies)
    assert copies.num_on_host == 0
    handle.remove()
    output = chain.run(Mark.apply(chain.blocks[0](x), _raise), offload, copies)  # type: ignore[no-untyped-call]
    with pytest.raises(Broken):
        output.sum().backward()  # type: ignore[no-untyped-call]
    del output
    assert copies.num_on_host == 0
    _train(*_made())


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


@pytest.mark.parametrize("is_weight", [True, False])
def test_autocasts_copies_of_weights_stay(is_weight: bool) -> None:
    block, copies = nn.Linear(64, 64, bias=False), LateCopies()
    x, other = torch.randn(2, 64, requires_grad=True), torch.randn(60, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Offload(CPU, copies, least_bytes=1024).call("block", block):
        output = x @ (block.weight if is_weight else other).t()
    assert len(copies.log) == (0 if is_weight else 1)
    assert output.requires_grad


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
