"""Selective recomputation: the results of costly operators are kept, the rest is computed again.

Written anew rather than by torch's ``create_selective_checkpoint_contexts``, which gives what it kept once, where a
second backward through a graph needs it again, and refuses operators that change a kept result in place, as
``relu(conv(x), inplace=True)`` does: here such a result is copied first.

Of the collectives of tensor parallel the results are kept, too. A matrix product that nothing but one of them reads is
not, and a recomputation gets memory without values in its place:

    forward          x --- product ---> partial sum --- all-reduce, reduce-scatter ---> result, kept
    recomputation    x                  no values                                       result

The slices of a sequence are gathered again: all of it takes as many times their memory as there are ranks.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_3d.activations.collective_mode import CollectiveMode
from lightning_3d.activations.saved_tensor import Save, Saved, SavedTensor
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.dispatch import (
    RESHAPE_ALIAS,
    UNSAFE_VIEW,
    Operator,
    OpOverload,
    TorchDispatchMode,
    alias_below_autograd,
    draws_random_numbers,
    may_write_any,
    name_of,
    schema_of,
    version_counter,
    written_arguments,
)
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map
from lightning_3d.torch_internals.tensors import storage_id, version_of

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

Call = tuple[OpOverload | None, int]
"""An operator, or None for a collective, and the number of this call of it."""


@functools.cache
def is_costly(operator: Operator) -> bool:
    """Whether its results are kept; those that it writes into its arguments are not."""
    is_mutable = isinstance(operator, OpOverload) and schema_of(operator).is_mutable
    return not is_mutable and name_of(operator).partition(".")[0] in _COSTLY


class _Results:
    """The results of one call.

    Args:
        results: Without history.
        calls: This one, and that whose result it used up.
    """

    def __init__(self, results: Any, keep: Save, calls: Sequence[Call]) -> None:
        self._keep, self.calls = keep, calls
        self._changes_later = False  # in place, by the block itself
        self._set(results)

    def _set(self, results: Any) -> None:
        self._counters = [version_counter(leaf) for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        self._versions = [version_of(counter) for counter in self._counters]
        self._kept = tree_map(self._keep_leaf, results)

    def _keep_leaf(self, leaf: Any) -> Saved:
        return self._keep(leaf) if isinstance(leaf, Tensor) else lambda: leaf

    def copy(self) -> None:
        """Keep the values of now, as the tensors will change."""
        self._set(tree_map(lambda saved: _cloned(saved()), self._kept))
        self._changes_later = True

    def unpack(self) -> Any:
        """The results for a recomputation, which may change them as the forward did.

        Raises:
            StepError: they were changed in place after the forward.
        """
        if [version_of(counter) for counter in self._counters] != self._versions:
            raise StepError(
                "A result that activations.recompute='selective' keeps was changed in place after the forward of its"
                " block, through an attribute of the block. Use activations.recompute='full', or leave the block out of"
                " activations.blocks."
            )
        again = _cloned if self._changes_later else _aliased
        return tree_map(lambda saved: again(saved()), self._kept)


class KeptResults:
    """The results of costly operators in one forward.

    Args:
        keep: Keeps them.
    """

    def __init__(self, keep: Save = SavedTensor) -> None:
        self._keep = keep
        self._given: dict[Call, Callable[[], Any]] = {}
        self._by_storage: dict[int, list[_Results]] = defaultdict(list)
        self._unread: tuple[Call, Any] | None = None  # the newest results, which nothing has read yet

    def keeping(self) -> TorchDispatchMode:
        """The mode for the forward."""
        return _Keeping(self)

    def giving(self) -> TorchDispatchMode:
        """The mode for a recomputation of it."""
        return _Giving(self)

    def add(self, call: Call, results: Any) -> None:
        """Keep what a costly operator returned, from when it is read."""
        self.before_read()
        self._unread = call, tree_map(_aliased, results)

    def before_read(self) -> None:
        """Keep the newest results, which something is about to read."""
        if self._unread is not None:
            (call, results), self._unread = self._unread, None
            self._put(results, [call])

    def before_change(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is kept in the memory of tensors that are about to change."""
        for tensor in tensors:
            for saved in self._by_storage.pop(_storage(tensor), ()):
                saved.copy()

    def on_collective(self, number: int, make: Callable[[], Tensor], donated: Tensor | None) -> Tensor:
        """Make a collective and keep its result in place of what it used up, if nothing else has read that."""
        product = None if donated is None else self._taken(donated)
        self.before_read()
        result = make()
        call: Call = (None, number)
        self._put(_aliased(result), [call] if product is None else [call, product])
        return result

    def _taken(self, tensor: Tensor) -> Call | None:
        """The call of a costly operator whose result is all of a tensor, and unread: it is not kept."""
        if self._unread is None:
            return None
        call, result = self._unread
        if not isinstance(result, Tensor) or result.numel() != tensor.numel() or _storage(result) != _storage(tensor):
            return None
        self._unread = None
        self._given[call] = partial(
            torch.empty_strided, result.size(), result.stride(), dtype=result.dtype, device=result.device
        )
        return call

    def _put(self, results: Any, calls: Sequence[Call]) -> None:
        saved = _Results(results, self._keep, calls)
        self._given[calls[0]] = saved.unpack
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._by_storage[_storage(leaf)].append(saved)

    def leave(self, output: Any) -> None:
        """Keep nothing that a block returns, which its caller may change: the last operators are computed again."""
        self.before_read()
        returned = {_storage(leaf) for leaf in tree_leaves(output) if type(leaf) is Tensor}
        left = [saved for storage in returned for saved in self._by_storage.get(storage, ())]
        for call in {call for saved in left for call in saved.calls}:
            del self._given[call]
        self._by_storage.clear()

    def find(self, call: Call) -> Callable[[], Any] | None:
        """Gives the results of a call, if they were kept."""
        return self._given.get(call)


class _Keeping(CollectiveMode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()
        self._results, self._numbers = results, Counter[OpOverload | None]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _VIEWS:
            return func(*args, **kwargs)
        self._results.before_read()
        if not is_costly(func):
            written = args if may_write_any(func) else written_arguments(func, args, kwargs)
            self._results.before_change(leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
            return func(*args, **kwargs)
        answer = func(*args, **kwargs)
        if not draws_random_numbers(func, args, kwargs):  # a recomputation has to draw them again
            self._results.add((func, self._numbers[func]), answer)
        self._numbers[func] += 1
        return answer

    def on_collective(self, make: Callable[[], Tensor], donated: Tensor | None) -> Tensor:
        self._numbers[None] += 1
        return self._results.on_collective(self._numbers[None], make, donated)


class _Giving(CollectiveMode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()
        self._results = results

    def __enter__(self) -> Any:
        self._numbers = Counter[OpOverload | None]()  # a graph may be run backwards several times
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch 2.13

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not is_costly(func):
            return func(*args, **(kwargs or {}))
        unpack = self._results.find((func, self._numbers[func]))
        self._numbers[func] += 1
        return func(*args, **(kwargs or {})) if unpack is None else unpack()

    def on_collective(self, make: Callable[[], Tensor], donated: Tensor | None) -> Tensor:
        self._numbers[None] += 1
        result: Tensor = (self._results.find((None, self._numbers[None])) or make)()
        return result


def _storage(tensor: Tensor) -> int:
    return storage_id(tensor.untyped_storage())


def _aliased(leaf: Any) -> Any:
    return alias_below_autograd(leaf) if isinstance(leaf, Tensor) else leaf


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
