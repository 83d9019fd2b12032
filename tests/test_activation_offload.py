"""Activations offloaded to host memory: order of the copies, lifetimes, and the same numbers as without.

Streams need an accelerator. Here copies that run as late as they may, from memory of the CPU to other memory of it,
take their place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import lightning_3d.strategy
from lightning_3d import ThreeDStrategy
from lightning_3d.activations import transfers
from lightning_3d.activations.offload import Offload
from lightning_3d.activations.transfers import SideStreams, Transfer, Transfers
from lightning_3d.config.activations import ActivationsConfig, Mode
from lightning_3d.config.settings import ThreeDConfig
from lightning_3d.distributed.mesh import MeshShape
from lightning_3d.errors import ConfigError, OffloadError, StepError
from lightning_3d.model.blocks import find_blocks
from lightning_3d.planning.plan import make_plan
from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.trainer import parallel_model
from tests.models import TinyGPT, features
from tests.parity import QUIET, Layout, fitted, whole_state
from tests.test_recomputation import BusyNet, Unusual
from tests.workers import WorkerPools

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


def test_nothing_stays_after_an_exception() -> None:
    chain, x, copies, offload = _made()
    chain.blocks[1].register_forward_hook(lambda module, args, output: _raise())
    with pytest.raises(Broken):
        chain.run(x, offload, copies)
    assert copies.num_on_host == 0
    chain, x, copies, offload = _made()
    output = Mark.apply(chain.blocks[0](x), _raise)  # type: ignore[no-untyped-call]
    output = chain.run(output, offload, copies)
    with pytest.raises(Broken):
        output.sum().backward()  # type: ignore[no-untyped-call]
    del output
    assert copies.num_on_host == 0
    chain, x, copies, offload = _made()
    chain.run(x, offload, copies).square().sum().backward()  # type: ignore[no-untyped-call]
    _assert_equal(_gradients(chain, x), _expected())


def test_a_graph_that_is_retained_has_several_backwards() -> None:
    chain, x, copies, offload = _made()
    loss = chain.run(x, offload, copies).square().sum()
    for _ in range(2):
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        _assert_equal(_gradients(chain, x), _expected())
    other = chain.run(x, offload, copies).square().sum()  # what it still keeps of the last block stays
    loss.backward()  # type: ignore[no-untyped-call]
    _assert_equal(_gradients(chain, x), _expected())
    other.backward()
    _assert_equal(_gradients(chain, x), _expected())
    assert copies.num_on_host == 0


def test_memory_that_is_used_again_is_not_taken_for_what_was_there() -> None:
    chain, x, copies, offload = _made()
    for _ in range(20):
        chain.run(x, offload, copies).square().sum().backward()  # type: ignore[no-untyped-call]
        _assert_equal(_gradients(chain, x), _expected())


def test_gradients_of_gradients() -> None:
    chain, x, copies, offload = _made()
    found = []
    for through in (None, offload):
        (gradient,) = torch.autograd.grad(chain.run(x, through, copies).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()  # type: ignore[no-untyped-call]
        found.append(_gradients(chain, x))
    _assert_equal(*found)


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
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x: Tensor, other: Tensor) -> Tensor:
            return x @ (self.weight if is_weight else other).t()

    block, copies = Product(), LateCopies()
    x, other = torch.randn(2, 64, requires_grad=True), torch.randn(60, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), Offload(CPU, copies, least_bytes=1024).call("block", block):
        output = block(x, other)
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


def test_a_block_stands_aside_under_hooks_of_its_caller() -> None:
    chain, x, copies, offload = _made(1)

    def run(x: Tensor) -> Tensor:
        return chain.run(x, offload, copies)

    checkpoint(run, x, use_reentrant=False).square().sum().backward()  # type: ignore[no-untyped-call]
    assert [entry for entry in copies.log if "backward" not in entry] == []
    found = _gradients(chain, x)
    chain.run(x, None, copies).square().sum().backward()  # type: ignore[no-untyped-call]
    for one, other in zip(found, _gradients(chain, x), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# ---- streams


def test_copies_begin_after_what_was_computed_and_are_waited_for_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Stream:
        def __init__(self, name: Any) -> None:
            self.name = name if isinstance(name, str) else f"side {len(streams)}"
            streams.append(self)

        def __enter__(self) -> None:
            log.append(f"{self.name} begins")

        def __exit__(self, *exc: object) -> None:
            log.append(f"{self.name} has its copy")

        def wait_stream(self, other: Stream) -> None:
            log.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            return f"event of {self.name}"

        def wait_event(self, event: str) -> None:
            log.append(f"{self.name} waits for {event}")

    def unpinned(tensor: Tensor, **settings: Any) -> Tensor:
        log.append(f"{'pinned' if settings.get('pin_memory') else settings['device']} memory")
        return torch.zeros_like(tensor)

    streams: list[Stream] = []
    computing = Stream("computing")
    with monkeypatch.context() as patches:
        patches.setattr(torch, "Stream", Stream)
        patches.setattr(torch, "empty_like", unpinned)
        patches.setattr(transfers.torch.accelerator, "current_stream", lambda device: computing)
        sides = SideStreams(CPU)
        tensor = torch.arange(3.0)
        leaving = sides.to_host(tensor)
        assert log == [
            "pinned memory",
            "side 1 waits for computing",
            "side 1 begins",
            "side 1 has its copy",
        ]
        log.clear()
        assert leaving.wait().tolist() == [0.0, 1.0, 2.0]
        assert log == ["computing waits for event of side 1"]
        coming = sides.to_device(leaving.wait())
        log.clear()
        del coming  # nobody waited for it: its memory must not be used before
        assert log == ["computing waits for event of side 2"]


def test_pinned_memory_that_runs_out_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **settings: Any) -> Tensor:
        raise RuntimeError("CUDA error: out of memory")

    with monkeypatch.context() as patches:
        patches.setattr(torch, "Stream", lambda device: None)
        patches.setattr(torch, "empty_like", full)
        with pytest.raises(OffloadError, match=r"no room for 4,096 further bytes in pinned memory.*activations\.every"):
            SideStreams(CPU).to_host(torch.zeros(1024))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_what_left_it() -> None:
    device = torch.device("cuda", 0)
    copies, found, peaks = LateCopies(), list[list[Tensor]](), list[int]()
    for offload in (None, Offload(device, SideStreams(device), least_bytes=512)):
        torch.manual_seed(0)
        chain = Chain(8).to(device)
        x = torch.randn(4096, WIDTH, device=device, requires_grad=True)  # 64 MiB between any two of the batch
        for _ in range(3):
            torch.accelerator.reset_peak_memory_stats()
            chain.run(x, offload, copies).square().mean().backward()  # type: ignore[no-untyped-call]
            peaks.append(torch.accelerator.max_memory_allocated())
            found.append(_gradients(chain, x))
    for gradients in found[1:]:
        for one, other in zip(gradients, found[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert max(peaks[3:]) < 0.7 * min(peaks[:3])


# ---- whole models


class Dropping(TinyGPT):
    """With dropout in blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.mlp.append(nn.Dropout(0.3))  # type: ignore[union-attr,operator]


@contextmanager
def _late_copies() -> Iterator[LateCopies]:
    """Let strategies offload on the CPU."""
    copies = LateCopies()
    with ExitStack() as stack:
        small = {"SideStreams": lambda device: copies, "Offload": partial(Offload, least_bytes=1)}
        stack.enter_context(attributes_replaced(parallel_model, small))
        allowed = {"refuse_offload": lambda config, device: None}
        stack.enter_context(attributes_replaced(lightning_3d.strategy, allowed))
        yield copies


def _trained(
    layout: Layout, trainer: dict[str, Any], model: Callable[[], L.LightningModule] = Dropping
) -> list[tuple[dict[str, float], dict[str, Tensor], int, int]]:
    """Metrics, state, copies to the host and back, without and with offload."""
    found = []
    for offload in (False, True):
        with _late_copies() as copies:
            activations = {**layout.activations, "offload": offload}
            runs, _ = fitted(replace(layout, activations=activations), model, **trainer)
            metrics = {name: float(value) for name, value in runs.callback_metrics.items()}
            assert copies.num_on_host == 0
            num_back = sum(entry.startswith("back") for entry in copies.log)
            found.append((metrics, whole_state(runs), len(copies.log), num_back))
    return found


LAYOUTS = {
    "one": Layout(),
    "pp2": Layout(pp=2),
    "dp2-zero3": Layout(dp=2, zero=3),
    "tp2": Layout(tp=2),
    "pp2-interleaved": Layout(pp=2, schedule="interleaved", stages_per_rank=2),
    "pp2-zbv": Layout(pp=2, num_microbatches=4, schedule="zbv", stages_per_rank=2),
    "pp2-gpipe-whole": Layout(pp=2, schedule="gpipe", num_microbatches=4, loss="whole"),
    "pp2-dp2-zero3": Layout(pp=2, dp=2, zero=3),
}
QUICK = {("one", "selective"), ("pp2", "none"), ("pp2-zbv", "none"), ("dp2-zero3", "none"), ("tp2", "full")}
TRAINERS: dict[str, dict[str, Any]] = {
    "fp32": {"epochs": 1},
    "bf16": {"epochs": 1, "precision": "bf16-mixed", "accumulate_grad_batches": 2},
}


def _rows() -> Iterator[Any]:
    for name, layout in LAYOUTS.items():
        for mode in ("none", "full", "selective"):
            for precision, trainer in TRAINERS.items():
                is_quick = (name, mode) in QUICK and precision == "fp32"
                marks = () if is_quick else pytest.mark.matrix
                row = replace(layout, activations={"recompute": mode})
                yield pytest.param(row, trainer, id=f"{name}-{mode}-{precision}", marks=marks)
    for mode in ("full", "selective"):
        row = replace(LAYOUTS["tp2"], activations={"recompute": mode, "partition": True})
        yield pytest.param(row, TRAINERS["fp32"], id=f"tp2-partition-{mode}", marks=pytest.mark.matrix)
    for mode in ("none", "full"):
        row = replace(LAYOUTS["pp2"], activations={"recompute": mode}, compile_backend="aot_eager")
        yield pytest.param(row, TRAINERS["fp32"], id=f"pp2-compiled-{mode}", marks=pytest.mark.matrix)


@pytest.mark.parametrize(("layout", "trainer"), [*_rows()])
def test_the_same_numbers_bit_by_bit(workers: WorkerPools, layout: Layout, trainer: dict[str, Any]) -> None:
    _check_numbers(workers, layout, trainer)


class Recurrent(nn.Module):
    """(B, 16) -> (B, 16), by a recurrent network and a transform of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.linear = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.rnn(x[:, None])
        added: Tensor = torch.vmap(lambda row: torch.tanh(self.linear(row)))(output[:, 0])
        return x + added


class ThroughMatrix(nn.Module):
    """(B, 16) -> (B, 16), by tensors that are sparse, complex and conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.fft(torch.sparse.mm(torch.eye(len(x)).to_sparse(), self.linear(x))).conj()
        return x + 0.1 * torch.tanh((waves * waves.conj()).real + waves.imag)


class Regression(L.LightningModule):
    """A batch is `(features, targets)`, (B, 8) and (B, 4) float32."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(8, 16), nn.ModuleList(kind() for _ in range(4))
        self.head = nn.Linear(16, 4)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = self.stem(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.mse_loss(self.head(x), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


UNUSUAL = {
    "busy": BusyNet,
    "in-place": Unusual,
    "recurrent": partial(Regression, Recurrent),
    "complex": partial(Regression, ThroughMatrix),
}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        pytest.param(
            layout, model, id=f"{name}-{at}", marks=() if name == "busy" and at == "one" else pytest.mark.matrix
        )
        for name, model in UNUSUAL.items()
        for at, layout in {"one": Layout(), "pp2": Layout(pp=2, num_microbatches=2)}.items()
    ],
)
def test_unusual_blocks(
    workers: WorkerPools, layout: Layout, model: Callable[[], L.LightningModule], mode: str
) -> None:
    """With buffers and inputs that they change, hooks, checkpoints inside, transforms, layouts other than strided."""
    _check_numbers(workers, replace(layout, activations={"recompute": mode}), {"data": features}, model)


def _check_numbers(
    workers: WorkerPools,
    layout: Layout,
    trainer: dict[str, Any],
    model: Callable[[], L.LightningModule] = Dropping,
) -> None:
    for plain, offloaded in workers(layout.world_size).run(_trained, layout, trainer, model):
        assert plain[0] == offloaded[0]
        for fqn, value in plain[1].items():
            torch.testing.assert_close(offloaded[1][fqn], value, rtol=0, atol=0, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
        assert plain[2:] == (0, 0)
        assert offloaded[3] > 0, "something came back"


class Watched(TinyGPT):
    """Notes which inputs of blocks are on the device still when all blocks have run."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        inputs = []
        for block in self.blocks:
            inputs.append(StorageWeakRef(x.untyped_storage()))
            x = block(x)
        if torch.is_grad_enabled():
            THERE.append([not reference.expired() for reference in inputs])
        logits: Tensor = self.head(self.norm(x))
        return logits


THERE: list[list[bool]] = []


def _inputs_there(mode: str) -> list[list[bool]]:
    THERE.clear()
    with _late_copies():
        fitted(Layout(activations={"offload": True, "recompute": mode}), Watched, epochs=1)
    return THERE[1:]


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_inputs_leave_the_device(workers: WorkerPools, mode: str) -> None:
    for steps in workers(1).run(_inputs_there, mode):
        assert steps == [[False, False, False, True]] * 3, "what the last block keeps is there"


def _sliced() -> list[int]:
    """Bytes of the storages that left, with slices of inputs."""
    sizes: list[int] = []

    class Sized(LateCopies):
        def to_host(self, tensor: Tensor) -> Transfer:
            sizes.append(tensor.nbytes)
            return super().to_host(tensor)

    activations = {"recompute": "full", "partition": True, "offload": True}
    with _late_copies(), attributes_replaced(parallel_model, {"SideStreams": lambda device: Sized()}):
        fitted(Layout(tp=2, activations=activations), Dropping, epochs=1, batches=1)
    return sizes


def test_with_partition_only_slices_leave(workers: WorkerPools) -> None:
    whole = 8 * 16 * 32 * 4  # batch, length, width
    for sizes in workers(2).run(_sliced):
        assert sizes == [whole // 2] * 4, "one slice of the input of each block"


def _with_offloaded_head() -> tuple[list[str], str]:
    """Where copies came from, and what the plan says of heads."""
    activations = {"blocks": ["blocks.*", "head"], "offload": True}
    with _late_copies() as copies:
        trainer, _ = fitted(Layout(activations=activations), Dropping, epochs=1, batches=1)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    return copies.log, str(trainer.strategy.plan.heads)


def test_heads_that_are_offloaded_are_not_fused(workers: WorkerPools) -> None:
    for log, heads in workers(1).run(_with_offloaded_head):
        assert log
        assert "what it keeps is offloaded (activations.offload)" in heads


class ByTransform(Recurrent):
    """Takes a gradient by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.func.grad(lambda x: self.linear(x).square().sum())(x)


def _refused(activations: dict[str, Any]) -> str:
    with _late_copies(), pytest.raises(StepError) as caught:
        fitted(Layout(activations=activations), partial(Regression, ByTransform), data=features)
    return str(caught.value)


@pytest.mark.parametrize("activations", [{"offload": True}, {"recompute": "full"}])
def test_transforms_that_torch_refuses_are_named(workers: WorkerPools, activations: dict[str, Any]) -> None:
    for message in workers(1).run(_refused, activations):
        assert message.startswith("blocks.0 takes gradients by torch.func")
        assert "Leave the block out of activations.blocks" in message


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
