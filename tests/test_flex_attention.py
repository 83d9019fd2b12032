"""FlexAttention of some heads or queries is that part of all of it; what its functions capture gets its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

from lightning_3d.sharding.placement import REPLICATE_PARTIAL_GRAD, Shard, chunked
from lightning_3d.sharding.rules.call import LocalCall, TorchCall
from lightning_3d.sharding.rules.flex_attention import attend_heads, attend_rows
from lightning_3d.sharding.sharded_tensor import ShardedTensor
from lightning_3d.tensor import plan_block
from lightning_3d.torch_internals.flex_attention import FlexOptions, calls_seen, flex_attention
from tests.law.models.flex import WIDTH, FlexBlock, trains_on_cpus

HEADS, LENGTH, BLOCK = 4, 48, 4


@pytest.fixture(autouse=True)
def on_cpus() -> Iterator[None]:
    with trains_on_cpus():
        yield


def operands(kv_heads: int = HEADS, length: int = LENGTH) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, length, 8, requires_grad=True) for heads in (HEADS, kv_heads, kv_heads)]


# ------------------------------------------------------------------------------------------------------------ parts

Mask = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

DOCUMENTS = torch.arange(LENGTH).div(torch.tensor([[7], [19]]), rounding_mode="floor")


def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= k) & (DOCUMENTS[b, q] == DOCUMENTS[b, k])


def windows(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Each head has its own."""
    return (q >= k) & (q - k <= 3 * h)


def mask_of(mask: Mask | None, num_heads: int | None = None) -> flex.BlockMask | None:
    if mask is None:
        return None
    return flex.create_block_mask(mask, 2, num_heads, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)


def alibi(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score - (q - k).abs() * 2.0**-h


PARTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "alibi": {"score_mod": alibi},
    "documents": {"block_mask": mask_of(documents)},
    "windows by head": {"score_mod": alibi, "block_mask": mask_of(windows, HEADS)},
    "log-sum-exp": {"block_mask": mask_of(documents), "return_aux": flex.AuxRequest(lse=True)},
}


def local_calls(
    rule: Callable[[TorchCall, Any], LocalCall | None], given: list[Tensor], cut: list[Shard | None], **options: Any
) -> Iterator[tuple[LocalCall | None, list[Tensor]]]:
    """By rank how it makes the call, and its operands."""
    for rank in range(2):
        axis: Any = SimpleNamespace(size=2, rank=rank)
        own = [tensor if at is None else at.own(tensor, 2, rank) for tensor, at in zip(given, cut, strict=True)]
        handles = [part if at is None else ShardedTensor(part, axis, at) for part, at in zip(own, cut, strict=True)]
        call = TorchCall(flex_attention, "flex_attention", (*handles, (), FlexOptions(**options)), {})
        yield rule(call, axis), own


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize(("rule", "dim", "kv_heads"), [(attend_heads, 1, 4), (attend_heads, 1, 1), (attend_rows, 2, 2)])
def test_a_part_is_that_of_the_whole(rule: Any, dim: int, kv_heads: int, name: str) -> None:
    options = {**PARTS[name], "enable_gqa": True}
    given, at = operands(kv_heads), Shard(dim)
    whole = flex_attention(*given, (), FlexOptions(**options))
    cut = [at, *(at if dim == 1 and kv_heads > 1 else None for _ in range(2))]
    made = []
    for local, own in local_calls(rule, given, cut, **options):
        assert local is not None
        assert local.input_placements == tuple(REPLICATE_PARTIAL_GRAD if place is None else place for place in cut)
        made.append(local.run(*own))
    if isinstance(whole, tuple):
        torch.testing.assert_close(torch.cat([aux.lse for _, aux in made], dim), whole[1].lse)
        whole, made = whole[0], [output for output, _ in made]
    torch.testing.assert_close(torch.cat(made, dim), whole)


def test_blocks_of_a_part_are_those_of_the_whole() -> None:
    """Kernels go by them, which torch's form for CPUs does not."""
    mask = mask_of(windows, HEADS)
    assert mask is not None
    seen: list[flex.BlockMask] = []
    dense = mask.to_dense()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "lightning_3d.sharding.rules.flex_attention.flex_attention", lambda *args: seen.append(args[-1].block_mask)
        )
        for rule, dim in ((attend_heads, 1), (attend_rows, 2)):
            at = Shard(dim)
            cut = [at, at, at] if dim == 1 else [at, None, None]
            for local, own in local_calls(rule, operands(), cut, block_mask=mask):
                assert local is not None
                local.run(*own)
    assert torch.equal(torch.cat([part.to_dense() for part in seen[:2]], 1), dense)
    assert torch.equal(torch.cat([part.to_dense() for part in seen[2:]], 2), dense)


def test_queries_that_are_no_whole_blocks_are_no_part() -> None:
    cut: list[Shard | None] = [chunked(2, LENGTH, 2), None, None]
    mask = flex.create_block_mask(documents, 2, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=9)
    assert [local for local, _ in local_calls(attend_rows, operands(), cut, block_mask=mask)] == [None, None]


def test_tensor_parallel_shards_blocks_with_it() -> None:
    mask = flex.create_block_mask(documents, 2, None, 16, 16, device="cpu", BLOCK_SIZE=BLOCK)
    plan = plan_block(FlexBlock(is_learned=True), (torch.randn(2, 16, WIDTH, requires_grad=True), mask), {}, size=2)
    roles = {weight.fqn: weight.shard_dim for weight in plan.weights if weight.fqn.startswith("attention")}
    assert roles["attention.query.weight"] == 0
    assert roles["attention.key_value.weight"] == 0
    assert roles["attention.output.weight"] == 1
    assert roles["attention.slopes"] is None


# --------------------------------------------------------------------------------------------------------- captured


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, HEADS))
        self.other = nn.Parameter(torch.ones(3))

    def of(self, h: Tensor) -> Tensor:
        return self.weight[h]

    def score(self, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return score + self.of(h) * (k - q)


OF_MODULE = Bias()


def of_global(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + OF_MODULE.weight[h] * (k - q)


def _scored(weight: Tensor, score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return score + weight[h] * (k - q)


def in_closure(bias: Bias) -> Any:
    weight = bias.weight
    return lambda score, b, h, q, k: score + weight[h] * (k - q)


CAPTURED: dict[str, Callable[[Bias], Any]] = {
    "a closure": in_closure,
    "a module in a closure": lambda bias: lambda score, b, h, q, k: score + bias.weight[h] * (k - q),
    "a function in a closure": lambda bias: (lambda of: lambda score, *rest: of(score, *rest))(in_closure(bias)),
    "a list": lambda bias: (lambda all: lambda score, b, h, q, k: score + all[0][h] * (k - q))([bias.weight]),
    "a partial application": lambda bias: partial(_scored, bias.weight),
    "a method": lambda bias: bias.score,
    "a global": lambda bias: of_global,
}


def _with_gradients(score_mod: Any, weight: Tensor, attend: Callable[..., Tensor]) -> list[Tensor]:
    given = operands()
    output = attend(*given, score_mod)
    return [output, *torch.autograd.grad(output.square().sum(), [*given, weight])]


def _by_hand(weight: Tensor, query: Tensor, key: Tensor, value: Tensor, score_mod: object) -> Tensor:
    rows = torch.arange(LENGTH)
    bias = weight[:, None, None] * (rows - rows[:, None])
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=bias.expand(2, -1, -1, -1))


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_captured_gets_its_gradient_where_users_code_is_not_compiled(name: str) -> None:
    bias = OF_MODULE if name == "a global" else Bias()
    expected = _with_gradients(None, bias.weight, partial(_by_hand, bias.weight))
    with torch.compiler.set_stance("force_eager"), calls_seen():
        found = _with_gradients(CAPTURED[name](bias), bias.weight, flex.flex_attention)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_call_that_the_user_compiled_runs_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    bias, compiled = Bias(), torch.compile(flex.flex_attention, backend=backend)
    expected = _with_gradients(None, bias.weight, partial(_by_hand, bias.weight))
    with torch.compiler.set_stance("force_eager"), calls_seen():
        found = _with_gradients(bias.score, bias.weight, compiled)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
