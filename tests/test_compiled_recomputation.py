"""Compiled blocks that are recomputed selectively, and buffers that blocks change in place before they use them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.selective import is_costly
from lightning_3d.torch_internals.dynamo import compiled
from tests.models import Block, TinyGPT
from tests.parity import Layout, assert_same_state, fitted, whole_state
from tests.workers import WorkerPools

WIDTH, HEADS, BATCH, LENGTH = 32, 4, 2, 16

SELECTIVE = {"recompute": "selective"}


class Dropping(Block):
    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)
        self.dropout = nn.Dropout(0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


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


def test_compiled_code_keeps_what_selective_recomputation_does() -> None:
    """The input; queries, keys, values; attention, its logsumexp, its projection; the first result of the MLP.

    A dropout behind the MLP is for its second result, and is drawn again from the state of the generator.
    """
    torch.manual_seed(0)
    activation, state = BATCH * LENGTH * WIDTH * 4, len(torch.get_rng_state())
    expected = activation * (1 + 3 + 1 + 1 / 8 + 1 + 4)  # a logsumexp per head of 8 channels
    for make, most in ((partial(Block, WIDTH, HEADS), expected), (Dropping, expected + activation + state)):
        block, x = make(), torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
        compile_it = partial(compiled, block.forward, backend="aot_eager", mode="default", compiling=nullcontext)
        _, gradient = _kept(block, list(block.parameters()), x)
        kept, found = _kept(compile_it(is_kept=is_costly), list(block.parameters()), x)
        torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-5)
        assert activation < kept <= most
        assert _kept(compile_it(), list(block.parameters()), x)[0] > 1.2 * kept


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


def test_blocks_that_run_eagerly_are_recomputed_eagerly(workers: WorkerPools) -> None:
    layout = Layout(tp=2)
    run, block = partial(workers(layout.world_size).run, _trained), partial(Looking, WIDTH, HEADS)
    plain, recomputed = run(layout, block), run(replace(layout, activations=SELECTIVE), block)
    found = run(replace(layout, compile_backend="aot_eager", activations=SELECTIVE), block)
    assert_same_state([state for state, _, _ in found], plain[0][0])
    assert recomputed[0][1] > 1.5 * plain[0][1] > 0
    assert found[0][1] >= recomputed[0][1], "each forward runs again in its backward"
    assert len(found[0][2]) == 1, "one warning"


class Noisy(Block):
    """Draws random numbers in the default dtype."""

    def __init__(self) -> None:
        super().__init__(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + 0.1 * torch.randn(WIDTH)))


def _trained_in_64(layouts: list[Layout]) -> list[dict[str, Tensor]]:
    return [_trained(layout, Noisy, precision="64-true")[0] for layout in layouts]


def test_a_recomputation_has_the_default_dtype_of_its_forward(workers: WorkerPools) -> None:
    again = [Layout(activations={"recompute": "full"}), Layout(compile_backend="aot_eager", activations=SELECTIVE)]
    ((plain, *found),) = workers(1).run(_trained_in_64, [Layout(), *again])
    assert_same_state(found, plain)
