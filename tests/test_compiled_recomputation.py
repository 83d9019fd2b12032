"""Compiled blocks that are recomputed selectively, and buffers that blocks change in place before they use them."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lightning_3d.activations.selective import is_costly
from lightning_3d.torch_internals.dynamo import compiled
from tests.models import Block, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

WIDTH, HEADS, BATCH, LENGTH = 32, 4, 2, 16

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
    ),
]

SELECTIVE = {"recompute": "selective"}


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class Checkpointing(Block):
    """Recomputes all of itself."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


def _kept(function: Callable[[Tensor], Tensor], weights: list[Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Bytes that a forward keeps beside weights, and the gradient of its input."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    return sum(size for at, size in kept.items() if at not in {weight.data_ptr() for weight in weights}), gradient


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_code_keeps_what_selective_recomputation_does(backend: str) -> None:
    """The input; queries, keys, values; attention, its logsumexp, its projection; the first result of the MLP.

    A dropout behind the MLP is for its second result, and is drawn again from the state of the generator.
    """
    torch.manual_seed(0)
    activation, state = BATCH * LENGTH * WIDTH * 4, len(torch.get_rng_state())
    expected = activation * (1 + 3 + 1 + 1 / 8 + 1 + 4)  # a logsumexp per head of 8 channels
    for make, most in ((partial(Block, WIDTH, HEADS), expected), (Dropping, expected + activation + state)):
        block, x = make(), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        compile_it = partial(compiled, block.forward, backend=backend, mode="default", compiling=nullcontext)
        _, gradient = _kept(block, list(block.parameters()), x)
        kept, found = _kept(compile_it(is_kept=is_costly), list(block.parameters()), x)
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-5)
        assert activation < kept <= most
        assert _kept(compile_it(), list(block.parameters()), x)[0] > 1.2 * kept


def test_a_checkpoint_inside_of_compiled_code_is_its_authors_choice() -> None:
    torch.manual_seed(0)
    block, x = Checkpointing(), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    _, gradient = _kept(block, list(block.parameters()), x)
    function = compiled(block.forward, backend="aot_eager", mode="default", compiling=nullcontext, is_kept=is_costly)
    kept, found = _kept(function, list(block.parameters()), x)
    torch.testing.assert_close(found, gradient)
    assert kept <= BATCH * LENGTH * WIDTH * 4 + len(torch.get_rng_state())


# ------------------------------------------------------------------------------------------------------------ training

FORWARDS: list[None] = []


class Looking(Block):
    """Its control flow depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            FORWARDS.append(None)
        return super().forward(x if x.sum() > 0 else -x)


class GPT(TinyGPT):
    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__(num_layers=2)
        self.blocks = nn.ModuleList(block() for _ in range(2))


def _trained(
    layout: Layout, block: Callable[[], nn.Module], **trainer: Any
) -> tuple[dict[str, Tensor], int, list[str]]:
    """The state, how often the forwards of blocks ran eagerly, and warnings of the compiler."""
    FORWARDS.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runs, _ = fitted(layout, partial(GPT, block), **trainer)
    told = [str(w.message) for w in caught if "compile.enabled" in str(w.message)]
    return whole_state(runs), len(FORWARDS), told


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_blocks_that_run_eagerly_are_recomputed_eagerly(workers: WorkerPools, layout: Layout) -> None:
    run, block = partial(workers(layout.world_size).run, _trained), partial(Looking, WIDTH, HEADS)
    plain, recomputed = run(layout, block), run(replace(layout, activations=SELECTIVE), block)
    found = run(replace(layout, compile_backend="aot_eager", activations=SELECTIVE), block)
    assert_same_state([state for state, _, _ in found], plain[0][0])
    assert recomputed[0][1] > 1.5 * plain[0][1] > 0
    assert found[0][1] >= recomputed[0][1], "each forward runs again in its backward"
    assert len(found[0][2]) == 1, "one warning"


class Counting(Block):
    """Changes buffers in place and computes with them, before and after."""

    num: Tensor
    mean: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.register_buffer("num", torch.ones(()))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.mean.clone()
        self.num.add_(1)
        y = super().forward(x) * (1 + 1 / self.num)
        with torch.no_grad():
            self.mean.mul_(0.5).add_(0.5 * y.abs().mean((0, 1)))
        return y / (self.mean + 0.5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", [{}, SELECTIVE], ids=["none", "selective"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_a_backward_reads_buffers_as_its_forward_found_them(
    workers: WorkerPools, layout: Layout, activations: dict[str, Any], backend: str
) -> None:
    run = partial(workers(layout.world_size).run, _trained)
    plain = run(layout, Counting)
    found = run(replace(layout, compile_backend=backend, activations=activations), Counting)
    assert_same_state([state for state, _, _ in found], plain[0][0])
    assert not any(told for _, _, told in found)


class Scaling(Block):
    """Is called with a buffer that its model changes after each call."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.register_buffer("scale", torch.full((WIDTH,), 1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(x * (1 + self.scale)))


class ScalingGPT(GPT):
    def __init__(self) -> None:
        super().__init__(Scaling)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            for _ in range(2):
                x = block(x)
                block.scale.mul_(0.5)  # type: ignore[union-attr,operator]
            block.scale.fill_(1.0)  # type: ignore[union-attr,operator]
        logits: Tensor = self.head(self.norm(x))
        return logits


def _state_of_scaling(layout: Layout) -> dict[str, Tensor]:
    trainer, _ = fitted(layout, ScalingGPT)
    return whole_state(trainer)


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_buffers_that_other_code_changes_before_the_backward(
    workers: WorkerPools, recompute: str, backend: str | None
) -> None:
    (plain,) = workers(1).run(_state_of_scaling, Layout())
    layout = Layout(compile_backend=backend, activations={"recompute": recompute})
    assert_same_state(workers(1).run(_state_of_scaling, layout), plain)


class Shifting(Block):
    """Changes its argument in place, before and after it computes with it."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x.clone())
        x.add_(1).mul_(0.5)
        return super().forward(y + torch.tanh(x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activations", [{}, SELECTIVE], ids=["none", "selective"])
@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2)], ids=str)
def test_a_backward_reads_arguments_as_its_forward_found_them(
    workers: WorkerPools, layout: Layout, activations: dict[str, Any], backend: str
) -> None:
    run = partial(workers(layout.world_size).run, _trained)
    plain = run(layout, Shifting)
    found = run(replace(layout, compile_backend=backend, activations=activations), Shifting)
    assert_same_state([state for state, _, _ in found], plain[0][0])


class Noisy(Block):
    """Draws random numbers in the default dtype."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.1 * torch.randn(WIDTH)))


def _trained_in_64(layout: Layout) -> tuple[dict[str, Tensor], int, list[str]]:
    return _trained(layout, Noisy, precision="64-true")


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_recomputation_has_the_default_dtype_of_its_forward(
    workers: WorkerPools, backend: Any, recompute: str
) -> None:
    layout = Layout(compile_backend=backend, activations={"recompute": recompute})
    ((plain, _, _),) = workers(1).run(_trained_in_64, Layout())
    ((found, _, _),) = workers(1).run(_trained_in_64, layout)
    assert_same_state([found], plain)
