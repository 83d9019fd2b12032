"""Selective recomputation: the results of costly operators are kept, the rest is computed again.

torch's ``create_selective_checkpoint_contexts`` is not used. It gives what it kept once, where a second backward needs
it again. It refuses operators that change a kept result in place, as ``relu(conv(x), inplace=True)`` does, or does not
see them and gives wrong gradients, as of ``(x @ w).mul_(2)`` for a 3-d ``x``; here it is copied first. It knows of no
collectives, nor offload, and takes no less time.

Of the collectives of tensor parallel the results are kept, too. A matrix product that nothing but one of them reads is
not, and a recomputation gets memory without values in its place:

    forward          x --- product ---> partial sum --- all-reduce, reduce-scatter ---> result, kept
    recomputation    x                  no values                                       result

The slices of a sequence are gathered again: all of it takes as many times their memory as there are ranks.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_3d.activations.collective_mode import CollectiveMode
from lightning_3d.activations.saved_tensor import Save, SavedTensor
from lightning_3d.torch_internals.dispatch import (
    RESHAPE_ALIAS,
    UNSAFE_VIEW,
    Operator,
    OpOverload,
    alias_below_autograd,
    draws_random_numbers,
    may_write_any,
    name_of,
    schema_of,
    written_arguments,
)
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves, tree_map, tree_map_only
from lightning_3d.torch_internals.tensors import storage_id

_NAMES = (
    "aten.mm aten.addmm aten.bmm aten.baddbmm aten._grouped_mm aten._scaled_mm aten.mkldnn_linear aten.convolution"
    " aten._convolution aten.linear aten._scaled_dot_product_flash_attention"
    " aten._scaled_dot_product_flash_attention_for_cpu aten._scaled_dot_product_efficient_attention"
    " aten._scaled_dot_product_cudnn_attention aten._scaled_dot_product_fused_attention_overrideable"
    " aten._scaled_dot_product_attention_math aten._flash_attention_forward aten._efficient_attention_forward"
    " _c10d_functional.all_reduce _c10d_functional.all_gather_into_tensor"
    " _c10d_functional.reduce_scatter_tensor _c10d_functional.all_to_all_single _c10d_functional.wait_tensor"
    " flex_attention torch_attn._varlen_attn flash_attn._flash_attn_forward flash_attn._flash_attn_varlen_forward"
)
"""Matrix products, convolutions, attention, and the collectives that return new tensors."""

_COSTLY = frozenset(name.replace(".", "::") for name in _NAMES.split())

_aten = torch.ops.aten

_VIEWS = frozenset(
    {
        *(_aten.view.default, _aten.detach.default, _aten.alias.default, _aten.t.default, _aten.permute.default),
        *(_aten.unsqueeze.default, _aten.transpose.int, RESHAPE_ALIAS, UNSAFE_VIEW),
    }
)
"""Operators that read no values, as they stand between a matrix product and its sum over the ranks."""

T = TypeVar("T")

Call = tuple[Operator | None, int]
"""An operator, or None for a collective, and the number of this call of it."""


@functools.cache
def is_costly(operator: Operator) -> bool:
    """Whether its results are kept; those that it writes into its arguments are not."""
    is_mutable = isinstance(operator, OpOverload) and schema_of(operator).is_mutable
    return not is_mutable and name_of(operator).partition(".")[0] in _COSTLY


@functools.cache
def _writes(operator: Operator) -> bool:
    """Whether it may write into its arguments: those that its schema names, or any."""
    return isinstance(operator, OpOverload) and (may_write_any(operator) or schema_of(operator).is_mutable)


class KeptResults(CollectiveMode):
    """The mode for a forward, which keeps the results of costly operators; `giving` is that of its recomputations.

    Args:
        keep: Keeps a tensor.
    """

    def __init__(self, keep: Save = SavedTensor) -> None:
        super().__init__()
        self._keep = keep
        self._numbers = Counter[Operator | None]()
        self._kept: dict[Call, Callable[[], object]] = {}
        self._by_storage: dict[int, list[Call]] = defaultdict(list)
        self._products: dict[Call, Call] = {}  # of collectives that used up the result of another call
        self._unread: tuple[Call, object] | None = None  # the newest results, while nothing but views has read them

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        self._unread = None
        if not is_costly(func):
            if _writes(func):
                self._copy_before(tree_leaves(args if may_write_any(func) else written_arguments(func, args, kwargs)))
            return func(*args, **kwargs)
        results, call = func(*args, **kwargs), self._number(func)
        if not draws_random_numbers(func, args, kwargs):  # a recomputation has to draw them again
            self._put(call, results)
            self._unread = call, results
        return results

    def on_collective(self, make: Callable[[], T], donated: Tensor | None) -> T:
        """Make a collective and keep its result in place of what it used up, if nothing else has read that."""
        product = None if donated is None else self._used_up(donated)
        self._unread = None
        result, call = make(), self._number(None)
        self._put(call, result)
        if product is not None:
            self._products[call] = product
        return result

    def _number(self, operator: Operator | None) -> Call:
        self._numbers[operator] += 1
        return operator, self._numbers[operator]

    def _put(self, call: Call, results: object) -> None:
        saved = tree_map(lambda leaf: _Kept(self._keep(leaf)) if isinstance(leaf, Tensor) else leaf, results)
        self._kept[call] = lambda: tree_map_only(_Kept, lambda leaf: alias_below_autograd(leaf.tensor()), saved)
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._by_storage[_storage(leaf)].append(call)

    def _copy_before(self, changed: list[object]) -> None:
        """Copy what is kept in the memory of tensors that are about to change; a recomputation changes it as well."""
        for leaf in changed:
            for call in self._by_storage.pop(_storage(leaf), ()) if isinstance(leaf, Tensor) else ():
                self._put(call, _cloned(self._kept[call]))
                self._kept[call] = functools.partial(_cloned, self._kept[call])

    def _used_up(self, tensor: Tensor) -> Call | None:
        """The call of a costly operator whose result is all of a tensor, and unread: it is kept no longer."""
        if self._unread is None:
            return None
        call, result = self._unread
        if not isinstance(result, Tensor) or result.numel() != tensor.numel() or _storage(result) != _storage(tensor):
            return None
        del self._by_storage[_storage(result)]
        self._kept[call] = functools.partial(
            torch.empty_strided, result.size(), result.stride(), dtype=result.dtype, device=result.device
        )
        return call

    def end(self, output: object) -> None:
        """Keep nothing that a block returns, which its caller may change: the last operators are computed again."""
        parts = (getattr(leaf, "local", leaf) for leaf in tree_leaves(output))  # of a sharded tensor this rank's part
        returned = {_storage(part) for part in parts if type(part) is Tensor}
        for call in {call for storage in returned for call in self._by_storage.get(storage, ())}:
            del self._kept[call]
            if call in self._products:
                del self._kept[self._products[call]]
        self._by_storage.clear()
        self._unread = None

    def giving(self) -> CollectiveMode:
        """The mode for a recomputation."""
        return _Giving(self._kept)


class _Kept:
    """In place of a tensor, in results that are kept."""

    def __init__(self, tensor: Callable[[], Tensor]) -> None:
        self.tensor = tensor


class _Giving(CollectiveMode):
    def __init__(self, saved: dict[Call, Callable[[], object]]) -> None:
        super().__init__()
        self._kept = saved

    def __enter__(self) -> object:
        self._numbers = Counter[Operator | None]()  # a graph may be run backwards several times
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch 2.13

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if not is_costly(func):
            return func(*args, **(kwargs or {}))
        return self._given(func, lambda: func(*args, **(kwargs or {})))

    def on_collective(self, make: Callable[[], T], donated: Tensor | None) -> T:
        result: T = self._given(None, make)
        return result

    def _given(self, operator: Operator | None, make: Callable[[], object]) -> Any:
        self._numbers[operator] += 1
        return self._kept.get((operator, self._numbers[operator]), make)()


def _cloned(unpack: Callable[[], object]) -> object:
    return tree_map_only(Tensor, torch.clone, unpack())


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())
