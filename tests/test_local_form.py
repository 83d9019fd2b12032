"""Which calls have a local form, make aliases of weights and keep sums: pure.

What the ranks would compute is computed here one rank after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_3d.tensor.rules.aliases import AliasDims, alias_dims
from lightning_3d.tensor.rules.call import Call
from lightning_3d.tensor.rules.function import function_name, map_tensors, tensors_in
from lightning_3d.tensor.rules.local_form import LocalForm, Operand, call_locally, local_form, signature
from lightning_3d.tensor.rules.partial_sums import is_linear_in

SIZE = 2
HEADS = (3, 4, 5, 8)  # [batch, heads, length, head_dim]


class Sharded:
    """Marks an argument as sharded on `dim`."""

    def __init__(self, *shape: int, dim: int) -> None:
        self.value, self.dim = torch.randn(shape), dim


def heads(dim: int = 1) -> Sharded:
    return Sharded(*HEADS, dim=dim)


def _form(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, LocalForm | None]:
    """The arguments with tensors in place of marks, and the decision."""
    dims: dict[int, int] = {}

    def value(item: Any) -> Any:
        if isinstance(item, list | tuple):
            return type(item)(value(part) for part in item)
        if isinstance(item, Sharded):
            dims[id(item.value)] = item.dim
            return item.value
        return item

    def operand(tensor: Tensor) -> Operand:
        return Operand(tensor.shape, tensor.dtype, tensor.device, dims.get(id(tensor)))

    values = (value(tuple(args)), {key: value(item) for key, item in kwargs.items()})
    form = local_form(function, signature(values[0], operand), signature(values[1], operand), SIZE)
    return (values, [dims.get(id(tensor)) for tensor in tensors_in(values)]), form


LOCAL = [
    (Tensor.view, (Sharded(3, 5, 32, dim=2), 3, 5, 4, -1), {}),
    (Tensor.view, (heads(), torch.int32), {}),
    (Tensor.unflatten, (Sharded(3, 5, 32, dim=2), -1, (4, 8)), {}),
    (Tensor.flatten, (Sharded(3, 5, 4, 8, dim=2), 2), {}),
    (Tensor.reshape, (Sharded(3, 5, 4, 8, dim=2), 3, 5, 32), {}),
    (Tensor.expand, (Sharded(3, 4, 1, 8, dim=1), 3, 4, 5, -1), {}),
    (Tensor.transpose, (heads(), 1, 2), {}),
    (Tensor.permute, (heads(), 0, 2, 1, 3), {}),
    (Tensor.unsqueeze, (heads(), 2), {}),
    (Tensor.chunk, (heads(), 2), {"dim": -1}),
    (torch.split, (heads(), 3, -1), {}),
    (torch.cat, ([heads(), heads()],), {"dim": -1}),
    (Tensor.__getitem__, (heads(), (Ellipsis, slice(None, 4))), {}),
    (Tensor.__getitem__, (heads(), (slice(None), slice(None), None)), {}),
    (Tensor.__mul__, (heads(), 2.0), {}),
    (Tensor.__mul__, (heads(), torch.randn(5, 8)), {}),
    (Tensor.__add__, (heads(), torch.randn(4, 5, 8)), {}),  # cut along the heads
    (Tensor.__rsub__, (heads(), torch.randn(3, 1, 5, 8)), {}),
    (torch.where, (torch.rand(5, 1) < 0.5, heads(), torch.zeros(())), {}),
    (Tensor.masked_fill, (heads(), torch.rand(5, 8) < 0.5, -1.0), {}),
    (Tensor.add_, (heads(), heads()), {"alpha": 0.5}),
    (Tensor.to, (heads(), torch.float64), {}),
    (F.softmax, (heads(), -1), {}),
    (F.silu, (heads(), True), {}),
    (F.layer_norm, (heads(), (8,), torch.randn(8), torch.randn(8)), {}),
    (F.rms_norm, (heads(), (8,), torch.randn(8)), {}),
    (Tensor.mean, (heads(), -1), {"keepdim": True}),
    (Tensor.topk, (heads(), 2), {}),
    (Tensor.sum, (heads(), 1), {}),
    (Tensor.mean, (heads(),), {}),
    (torch.matmul, (Sharded(3, 5, 32, dim=2), torch.randn(32, 8)), {}),  # the matrix is cut along its rows
]


@pytest.mark.parametrize(("function", "args", "kwargs"), LOCAL, ids=lambda value: getattr(value, "__name__", ""))
def test_shards_of_the_result_are_the_results_on_shards(
    function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    ((full_args, full_kwargs), dims), form = _form(function, args, kwargs)
    assert form is not None
    shards = []
    for rank in range(SIZE):
        along = iter([cut if dim is None else dim for dim, cut in zip(dims, form.cuts, strict=True)])
        own = map_tensors(lambda tensor: _shard(tensor, along, rank), (full_args, full_kwargs))  # noqa: B023
        shards.append(list(tensors_in(_call(function, *own, form.local_shape))))
    expected = list(tensors_in(function(*full_args, **full_kwargs)))
    assert len(expected) == len(form.dims)
    for tensor, dim, parts in zip(expected, form.dims, zip(*shards, strict=True), strict=True):
        made = torch.stack(parts).sum(0) / (SIZE if form.is_mean else 1) if dim is None else torch.cat(parts, dim)
        assert torch.equal(made, tensor) or torch.allclose(made, tensor, atol=1e-5)


def _call(function: Callable[..., Any], args: Any, kwargs: Any, local_shape: tuple[int, ...] | None) -> Any:
    return function(*args, **kwargs) if local_shape is None else call_locally(function, local_shape, args[0])


def _shard(tensor: Tensor, along: Iterator[int | None], rank: int) -> Tensor:
    dim = next(along)
    return tensor.clone() if dim is None else tensor.chunk(SIZE, dim)[rank].clone()


@pytest.mark.parametrize(
    ("function", "args", "kwargs"),
    [
        (F.softmax, (heads(), 1), {}),
        (Tensor.amax, (heads(), 1), {}),
        (Tensor.var, (heads(), 1), {}),
        (Tensor.cumsum, (heads(), 1), {}),
        (Tensor.cumsum, (heads(), -3), {}),  # torch 2.13's rule takes it for another dim
        (torch.cumprod, (heads(), -3), {}),
        (torch.logcumsumexp, (heads(), -3), {}),
        (Tensor.cumsum_, (heads(), -3), {}),
        (Tensor.cummax, (heads(), -3), {}),
        (Tensor.flip, (heads(), (1,)), {}),
        (Tensor.split, (heads(), 2, 1), {}),
        (Tensor.flatten, (heads(), 0, 1), {}),
        (Tensor.view, (Sharded(3, 5, 32, dim=2), 3, 5, 1, 32, 1, 1), {"dtype": 1}),  # no such call
        (Tensor.view, (Sharded(3, 5, 6, dim=2), 3, 5, 3, 2), {}),  # three heads on two ranks
        (Tensor.__add__, (heads(), heads(dim=3)), {}),
        (Tensor.add_, (heads(), heads(dim=3)), {}),
        (Tensor.squeeze, (Sharded(3, 2, 5, dim=1),), {}),  # a shard has one more dim of length 1
        (Tensor.item, (heads(),), {}),
        (Tensor.tolist, (heads(),), {}),
        (torch.equal, (heads(), heads()), {}),
        (Tensor.stride, (heads(),), {}),
        (Tensor.new_zeros, (heads(), HEADS), {}),
        (Tensor.__getitem__, (heads(), torch.rand(HEADS) < 0.5), {}),
        (torch.nonzero, (heads(),), {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_calls_without_a_local_form(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    assert _form(function, args, kwargs)[1] is None


def test_replicated_operands_are_cut_where_they_vary_along_the_shards() -> None:
    _, form = _form(Tensor.__add__, (heads(), torch.randn(4, 1, 8)), {})
    assert form is not None
    assert form.cuts == (None, 0)
    _, form = _form(Tensor.__add__, (heads(), torch.randn(1, 5, 8)), {})
    assert form is not None
    assert form.cuts == (None, None)


def test_a_decision_is_taken_once_and_not_under_another_mode() -> None:
    arguments = (F.gelu, (Sharded(3, 7, 32, dim=2),), {})
    with torch.inference_mode():
        _, form = _form(*arguments)
    misses = local_form.cache_info().misses
    assert form is not None
    assert _form(*arguments)[1] is form
    assert local_form.cache_info().misses == misses


@pytest.mark.parametrize(
    ("call", "dims"),
    [
        (lambda w: w[1], (1, 2)),
        (lambda w: w[-1, ...], (1, 2)),
        (lambda w: w[torch.tensor(1)], (1, 2)),
        (lambda w: w[torch.tensor([1, 0]), :], (None, 1, 2)),
        (lambda w: w[[2, 0]], (None, 1, 2)),
        (lambda w: w[torch.zeros(4, 2, dtype=torch.int64)], (None, None, 1, 2)),
        (lambda w: w[1:2], (None, 1, 2)),
        (lambda w: w.select(0, 1), (1, 2)),
        (lambda w: w.unbind()[0], (1, 2)),
        (lambda w: w.index_select(index=torch.tensor([1]), dim=0), (None, 1, 2)),
        (lambda w: w.split(1)[0], (None, 1, 2)),
        (lambda w: w.narrow(0, 0, 1), (None, 1, 2)),
        (lambda w: w.mT, (0, 2, 1)),
        (lambda w: w.transpose(-2, -1), (0, 2, 1)),
        (lambda w: w.permute(2, 0, 1), (2, 0, 1)),
        (lambda w: w.to(torch.float64), (0, 1, 2)),
        (lambda w: w[:, 1], None),
        (lambda w: w[..., 0], None),
        (lambda w: w[torch.tensor([True, False, True])], None),
        (lambda w: w[None], None),
        (lambda w: w.select(1, 0), None),
        (lambda w: w.unbind(-1)[0], None),
        (lambda w: w * 2, None),
    ],
)
def test_calls_that_make_aliases(call: Callable[[Tensor], Tensor], dims: tuple[int | None, ...] | None) -> None:
    weight = torch.arange(3 * 4 * 5.0).view(3, 4, 5)
    with _CallsWith(weight) as mode:
        alias = call(weight)
    assert alias_dims(mode.seen[0]) == dims
    if dims is not None:
        assert [length for length, dim in zip(alias.shape, dims, strict=True) if dim is not None] == [
            weight.shape[dim] for dim in dims if dim is not None
        ]


def test_slices_of_two_dimensional_weights_are_no_aliases() -> None:
    def dims(name: str, *args: object) -> AliasDims | None:
        return alias_dims(Call(getattr(Tensor, name), name, args, {}))

    assert dims("__getitem__", torch.empty(4, 2), slice(2)) is None
    assert dims("chunk", torch.empty(4, 2), 2) is None
    assert dims("__getitem__", torch.empty(4, 2), 1) == (1,)
    assert dims("__getitem__", torch.empty(4), 1) is None


@pytest.mark.parametrize(
    ("call", "keeps"),
    [
        (lambda y, w: y * w[:, :1], True),
        (lambda y, w: w * y, True),
        (lambda y, w: 2.0 * y, True),
        (lambda y, w: y.sum(0), True),
        (lambda y, w: y.view(2, 2, 3), True),
        (lambda y, w: y.transpose(0, 1), True),
        (lambda y, w: y[torch.tensor([3, 1, 0, 2])], True),
        (lambda y, w: y.to(torch.float32), True),
        (lambda y, w: y * y, False),
        (lambda y, w: y * w[None], False),
        (lambda y, w: y * w.double(), False),
        (lambda y, w: y + w, False),
        (lambda y, w: y + 1, False),
        (lambda y, w: y.mul_(2), False),
        (lambda y, w: y.sum(), False),
        (lambda y, w: y.sum(0, dtype=torch.float64), False),
        (lambda y, w: y.to(torch.float64), False),
        (lambda y, w: y.view(torch.int32), False),
        (lambda y, w: y[torch.tensor([True, False, True, True])], False),
        (lambda y, w: y[torch.tensor([0, 1])], False),
        (lambda y, w: y.relu(), False),
    ],
)
def test_calls_that_sums_wait_for(call: Callable[[Tensor, Tensor], Tensor], keeps: bool) -> None:
    y, w = torch.randn(4, 3), torch.randn(4, 3)
    with _CallsWith(y) as mode:
        call(y, w)
    assert is_linear_in(y, mode.seen[0]) is keeps


class _CallsWith(TorchFunctionMode):
    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self.tensor, self.seen = tensor, list[Call]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(arg is self.tensor for arg in args):
            self.seen.append(Call(func, function_name(func), args, kwargs or {}))
        return func(*args, **(kwargs or {}))
