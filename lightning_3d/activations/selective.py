"""Selective recomputation: the results of costly operators are kept, the rest is computed again.

Written anew rather than by torch's ``create_selective_checkpoint_contexts``, which gives what it kept once, where a
second backward through a graph needs it again, and refuses operators that change a kept result in place, as
``relu(conv(x), inplace=True)`` does: here such a result is copied first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_3d.activations.kept_tensor import Keep, Kept, KeptTensor
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.dispatch import (
    OpOverload,
    TorchDispatchMode,
    alias_below_autograd,
    draws_random_numbers,
    may_write_any,
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
)
"""Matrix products, convolutions, attention, and the collectives that return new tensors."""


def _operators(names: str) -> frozenset[OpOverload]:
    found = set()
    for name in names.split():
        namespace, _, operator = name.partition(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        if packet is not None and "default" in packet.overloads():
            found.add(packet.default)
    return frozenset(found)


_COSTLY = _operators(_NAMES)


def is_costly(operator: OpOverload) -> bool:
    """Whether its results are kept."""
    return operator in _COSTLY


class _Results:
    """The results of one call of an operator."""

    def __init__(self, results: Any, keep: Keep) -> None:
        self._keep = keep
        self._changes_later = False  # in place, by the block itself
        self._set(tree_map(_aliased, results))

    def _set(self, results: Any) -> None:
        self._counters = [version_counter(leaf) for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        self._versions = [version_of(counter) for counter in self._counters]
        self._kept = tree_map(self._keep_leaf, results)

    def _keep_leaf(self, leaf: Any) -> Kept:
        return self._keep(leaf) if isinstance(leaf, Tensor) else lambda: leaf

    def copy(self) -> None:
        """Keep the values of now, as the tensors will change."""
        self._set(tree_map(lambda kept: _cloned(kept()), self._kept))
        self._changes_later = True

    def given(self) -> Any:
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
        return tree_map(lambda kept: again(kept()), self._kept)


class KeptResults:
    """The results of costly operators in one forward.

    Args:
        keep: Keeps them.
    """

    def __init__(self, keep: Keep = KeptTensor) -> None:
        self._keep = keep
        self._of: dict[OpOverload, dict[int, _Results]] = defaultdict(dict)  # operator -> number of its call -> results
        self._by_storage: dict[int, list[_Results]] = defaultdict(list)

    def keeping(self) -> TorchDispatchMode:
        """The mode for the forward."""
        return _Keeping(self)

    def giving(self) -> TorchDispatchMode:
        """The mode for a recomputation of it."""
        return _Giving(self)

    def add(self, operator: OpOverload, number: int, results: Any) -> None:
        """Keep what a call of an operator returned."""
        kept = self._of[operator][number] = _Results(results, self._keep)
        for leaf in tree_leaves(results):
            if isinstance(leaf, Tensor):
                self._by_storage[storage_id(leaf.untyped_storage())].append(kept)

    def before_change(self, tensors: Iterable[Tensor]) -> None:
        """Copy what is kept in the memory of tensors that are about to change."""
        for tensor in tensors:
            for kept in self._by_storage.pop(storage_id(tensor.untyped_storage()), ()):
                kept.copy()

    def leave(self, output: Any) -> None:
        """Keep nothing that a block returns, which its caller may change: the last operators are computed again."""
        returned = {storage_id(leaf.untyped_storage()) for leaf in tree_leaves(output) if type(leaf) is Tensor}
        left = {id(kept) for storage in returned for kept in self._by_storage.get(storage, ())}
        for calls in self._of.values():
            for number in [number for number, kept in calls.items() if id(kept) in left]:
                del calls[number]
        self._by_storage.clear()

    def find(self, operator: OpOverload, number: int) -> _Results | None:
        """The results that were kept of a call."""
        return self._of[operator].get(number) if operator in self._of else None


class _Keeping(TorchDispatchMode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._results, self._numbers = results, Counter[OpOverload]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _COSTLY:
            written = args if may_write_any(func) else ()
            if schema_of(func).is_mutable:
                written = tuple(written_arguments(func, args, kwargs))
            self._results.before_change(leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor))
            return func(*args, **kwargs)
        answer = func(*args, **kwargs)
        if not draws_random_numbers(func, args, kwargs):  # a recomputation has to draw them again
            self._results.add(func, self._numbers[func], answer)
        self._numbers[func] += 1
        return answer


class _Giving(TorchDispatchMode):
    def __init__(self, results: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._results, self._numbers = results, Counter[OpOverload]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func not in _COSTLY:
            return func(*args, **(kwargs or {}))
        kept = self._results.find(func, self._numbers[func])
        self._numbers[func] += 1
        return func(*args, **(kwargs or {})) if kept is None else kept.given()


def _aliased(leaf: Any) -> Any:
    return alias_below_autograd(leaf) if isinstance(leaf, Tensor) else leaf


def _cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
