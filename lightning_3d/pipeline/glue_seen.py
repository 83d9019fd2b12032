"""Computations on the batch alone, in the code around the blocks, whose results go to blocks or to calls on theirs.

A finding about a step holds for these, and no further: an attribute or a random number, of which no trace tells, may
let later steps mix samples. They are compared by names of functions and of what made their arguments; numbers, sizes
and data may be others in each step, and how often something is done.

    x = 0.7 * x + 0.3 * x.flip(0)       mul of a number; flip; add of mul
    if x.max() > 1:                     bool of gt; gt of max, a number
    self.log("mean", x.mean())          nothing, as no block gets it
    net(x)                              the first block of add
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import storage_of, version_of

Computation: TypeAlias = tuple[str, frozenset[Hashable]]
"""Name of a function or block, and what made or are its arguments, whatever their order and number."""
_MAX_NAMED = 5  # functions in a message


class UnseenError(StepError):
    """A step does otherwise than those that were studied."""


@dataclass(kw_only=True)
class SeenGlue:
    """The computations that a finding holds for; known where steps end, on the last stage."""

    is_studied: bool = True
    """Whether the present step is the one that was studied, whose computations are those."""
    is_doubted: bool = False
    """Whether a step had others, so that the next one is studied."""
    known: set[Computation] = field(default_factory=set)


class HandedOver:
    """Notes the computations of one run of a step on a microbatch.

    Args:
        glue: Of the steps that were studied.
    """

    def __init__(self, glue: SeenGlue) -> None:
        self._glue = glue
        self._computations: set[Computation] = set()  # behind all that was handed over by now, and how it was
        self._made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # tensor -> name of its maker, and all behind
        self._written: dict[int | None, tuple[Tensor, frozenset[Computation]]] = {}  # by storage that changed in place

    def call(self, draw: AnyCallable, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Let ``draw`` make a call on the batch alone."""
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]
        name = getattr(func, "__name__", type(func).__name__)
        behind = self._behind(name, leaves)
        answer = draw(func, args, kwargs)
        for tensor, version in zip(tensors, versions, strict=True):
            if not tensor.is_inference() and version_of(tensor) != version:
                self._written[storage_of(tensor)] = tensor, behind
        for leaf in tree_leaves(answer):
            if not isinstance(leaf, Tensor):  # a number or an array, which may come back
                self._computations |= behind
            elif not any(leaf is tensor for tensor in tensors):
                self._made[leaf] = name, behind
        return answer

    def hand(self, name: str, leaves: Sequence[object]) -> None:
        """A block, or a call on what blocks gave, gets these."""
        self._computations |= self._behind(name, leaves)

    def _behind(self, name: str, leaves: Sequence[object]) -> frozenset[Computation]:
        """The computations behind what a function of this name makes of these."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        made = [self._made[tensor] for tensor in tensors if tensor in self._made]
        behind = [of_tensor for _, of_tensor in made]
        if self._written:
            storages = set(map(storage_of, tensors)) & self._written.keys()
            behind += [self._written[storage][1] for storage in storages]
        others = (_described(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        return frozenset({(name, frozenset((*others, *(maker for maker, _ in made))))}).union(*behind)

    def problem(self, name: str) -> UnseenError | None:
        """After the run of a step of this name: whether it has other computations than those that were studied."""
        new = self._computations - self._glue.known
        if self._glue.is_studied:
            self._glue.known |= new
        if self._glue.is_studied or not new:
            return None
        functions = ", ".join(sorted({function for function, _ in new})[:_MAX_NAMED])
        return UnseenError(
            f"{name} has come to compute what it hands to its blocks, or compares with what they give, by other calls"
            f" than when it was found out whether microbatches can run it: {functions}. Do the same in all steps, or"
            " set pipeline.mode=inline."
        )


def _described(leaf: object) -> Hashable:
    """A flag or a word as it is; of others their type, as numbers change from step to step, but for zero, which may be
    the dim of the samples.
    """
    if isinstance(leaf, (bool, str)):
        return leaf
    if isinstance(leaf, (int, float)):
        return "0" if type(leaf) is int and leaf == 0 else "a number"
    return type(leaf).__name__
