"""Collectives of tensor parallel in blocks that keep the results of costly operators: made once, and never wrongly."""

from __future__ import annotations

import copy
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.activations.kept_tensor import KeptTensor
from lightning_3d.activations.offload import Offload
from lightning_3d.activations.recomputation import Recomputation
from lightning_3d.distributed.rng import Generators
from lightning_3d.planning.memory.block_memory import measure_memory
from lightning_3d.planning.memory.live_bytes import LiveBytes
from lightning_3d.tensor import apply_block, plan_block
from lightning_3d.tensor.axis import Kind, MeshAxis
from lightning_3d.tensor.collectives import gather, gather_sequence, reduce, scatter
from lightning_3d.tensor.placement import Shard
from lightning_3d.torch_internals.modules import attributes_replaced
from lightning_3d.trace.ghost import TensorMeta
from tests.models import Block, TinyGPT
from tests.parity import Layout, fitted, whole_state
from tests.test_activation_offload import LateCopies
from tests.workers import WorkerPools

CPU = torch.device("cpu")
WIDTH = 8


# ---- one block, on an axis whose other rank has the same


class Twins:
    """An axis of two ranks that have the same values; counts collectives."""

    size, rank = 2, 0

    def __init__(self) -> None:
        self.made: Counter[str] = Counter()

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.made["all-reduce"] += 1
        return tensor.mul_(2.0)

    def all_gather(self, local: Tensor, dim: int) -> Tensor:
        self.made["all-gather"] += 1
        return torch.cat([local, local], dim)

    def reduce_scatter(self, tensor: Tensor, dim: int) -> Tensor:
        self.made["reduce-scatter"] += 1
        return tensor.chunk(2, dim)[0] * 2.0

    def expect_backward(self, result: Tensor, kind: Kind, tensor: Tensor) -> None:
        """Nothing."""


class Summing(nn.Module):
    """A block that calls a function with its input, (2, 4, WIDTH), its weight and its axis."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.axis = function, Twins()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def __deepcopy__(self, memo: Any) -> Summing:
        other = Summing(self.function)
        other.load_state_dict(self.state_dict())
        return other

    def forward(self, x: Tensor) -> Any:
        return self.function(x, self.weight, self.axis)


def _plain(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    hidden = torch.tanh(reduce(F.linear(x, weight), axis))
    return x + torch.sigmoid(reduce(F.linear(hidden, weight), axis))


def _read_before(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    product = x @ weight
    read = product.sigmoid()
    return torch.tanh(reduce(product, axis)) * read


def _changed_before(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    product = (x @ weight).mul_(0.5)
    return torch.tanh(reduce(product, axis)).sin()


def _changed_later(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    total = reduce(x @ weight, axis)
    total += x
    return torch.tanh(total.sin_()) * 2.0


def _returned(x: Tensor, weight: Tensor, axis: Twins) -> tuple[Tensor, Tensor]:
    total = reduce(x @ weight, axis)
    return torch.tanh(total * torch.sigmoid(total)), total


def _scattered(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    own = torch.tanh(scatter(F.linear(x, weight), axis, 1))
    return torch.sigmoid(scatter(F.linear(torch.cat([own, own], 1), weight), axis, 1))


def _gathered(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    local = x @ weight
    whole = torch.tanh(gather(local, axis, Shard(2)))
    return whole.sigmoid() * torch.cat([local, local], 2).tanh()


def _masked(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    hidden = F.dropout(reduce(F.linear(x, weight), axis), 0.5)
    return F.dropout(torch.tanh(reduce(hidden @ weight, axis)), 0.5)


def _along_sequence(x: Tensor, weight: Tensor, axis: Twins) -> Tensor:
    whole = gather_sequence(torch.tanh(x), axis, 1)
    return torch.tanh(scatter(torch.relu(whole) @ weight, axis, 1))


FUNCTIONS = [
    *(_plain, _read_before, _changed_before, _changed_later, _returned),
    *(_scattered, _gathered, _masked),
]


def _outcome(block: Summing, call: Callable[[Tensor], Any], num_backwards: int) -> tuple[list[Tensor], Counter[str]]:
    """Outputs and gradients of two calls, and the collectives of the second."""
    found: list[Tensor] = []
    for _ in range(2):  # the first call finds out what the block does
        block.axis.made.clear()
        torch.manual_seed(1)
        x = torch.randn(2, 4, WIDTH, requires_grad=True)
        outputs = call(x * 1.0)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((output.square() + output).sum() for output in outputs)
        for i in range(num_backwards):
            found += torch.autograd.grad(loss, [x, block.weight], retain_graph=i + 1 < num_backwards)
        found += outputs
    return found, block.axis.made


@pytest.fixture
def nan_in_new_memory() -> Iterator[None]:
    """So that whoever reads memory without values is found."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty_strided((2, 2), (1, 2)).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nan_in_new_memory")
@pytest.mark.parametrize("num_backwards", [1, 2])
@pytest.mark.parametrize("offloads", [False, True], ids=["kept", "offloaded"])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__.strip("_"))
def test_gradients_are_those_of_the_block_and_no_collective_is_made_again(
    function: Callable[..., Any], offloads: bool, num_backwards: int
) -> None:
    torch.manual_seed(0)
    plain = Summing(function)
    kept = copy.deepcopy(plain)
    offload = Offload(CPU, LateCopies(), least_bytes=1) if offloads else None
    recomputed = Recomputation(
        "block", kept, "selective", Generators(CPU), keep=KeptTensor if offload is None else offload.keep
    )

    def call(x: Tensor) -> Any:
        with nullcontext() if offload is None else offload.call("block", kept):
            return recomputed(kept, (x,), {})

    expected, made = _outcome(plain, plain, num_backwards)
    found, again = _outcome(kept, call, num_backwards)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    if function is not _returned:  # what a block returns is not kept
        assert again == made


def test_a_gathered_sequence_is_gathered_again() -> None:
    block = Summing(_along_sequence)
    recomputed = Recomputation("block", block, "selective", Generators(CPU))
    _, made = _outcome(block, lambda x: recomputed(block, (x,), {}), 1)
    assert made == {"all-gather": 2 + 1, "reduce-scatter": 1 + 1}, "forward, recomputation and backward"


# ---- whole models


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


LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2-sequence": Layout(tp=2, sequence_parallel=True),
    "tp2-partition": Layout(tp=2, activations={"partition": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_fit_makes_as_many_collectives_as_without_recomputation(workers: WorkerPools, layout: Layout) -> None:
    pools = workers(layout.world_size)
    plain = pools.run(_made, replace(layout, activations={}), ["none"])
    recomputed = pools.run(_made, layout, ["full", "selective"])
    for [(expected, made)], [full, selective] in zip(plain, recomputed, strict=True):
        assert made["all_reduce"] > 0
        for state, _ in (full, selective):
            for fqn, value in expected.items():
                torch.testing.assert_close(state[fqn], value, rtol=0, atol=1e-6, msg=lambda m, fqn=fqn: f"{fqn}: {m}")
        assert selective[1] == made
        assert sum(full[1].values()) > sum(made.values())


# ---- collectives of the block's own code


# ---- memory


def _kept_bytes(along: bool) -> tuple[int, int]:
    """Bytes that a recomputed block keeps beside its input, predicted and measured."""
    torch.manual_seed(0)
    mesh, block, shape = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), Block(32, 4), (2, 8, 32)
    plan = plan_block(block, (torch.randn(shape),), {}, size=2, sequence_parallel=along)
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


@pytest.mark.parametrize("along", [False, True], ids=["whole", "sequence"])
def test_blocks_keep_what_is_planned(workers: WorkerPools, along: bool) -> None:
    activation = 4 * 2 * 8 * 32
    # q, k, v, attention with its logsumexp, and up, four times as wide, on this rank; out and down.
    sharded, logsumexp, summed = 8 * activation // 2, 4 * 2 * 2 * 8, 2 * activation
    for predicted, measured in workers(2).run(partial(_kept_bytes, along)):
        assert predicted == measured == sharded + logsumexp + (summed // 2 if along else summed)
