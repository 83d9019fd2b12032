"""Arguments of a block that lie in the same memory: what one changes in place, the others see.

Copies of them for a recomputation share memory as they do, and autograd holds those for views of one tensor that it
held so in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.tensors import base_of, storage_of


class _Part(NamedTuple):
    """A tensor in a stretch of memory."""

    at: int
    """Its index among the arguments."""

    identity: int
    """Equal for a tensor that is given several times."""

    family: int
    """Equal for views of one tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Memory in which several arguments lie."""

    parts: Sequence[_Part]
    start: int
    length: int

    def copied(self, leaves: Sequence[Any]) -> Tensor:
        """A copy of it, (length,)."""
        own: Tensor = leaves[self.parts[0].at].detach()
        requires_grad = any(part.requires_grad for part in self.parts)
        return own.as_strided((self.length,), (1,), self.start).clone().requires_grad_(requires_grad)

    def views(self, memory: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Index and tensor of each argument, in a copy."""
        families: dict[int, Tensor] = {}
        made: dict[int, Tensor] = {}
        for part in self.parts:
            if part.family not in families:
                alias = memory if not families and part.requires_grad == memory.requires_grad else memory.detach()
                families[part.family] = alias if alias is memory else alias.requires_grad_(part.requires_grad)
            if part.identity not in made:
                offset = part.offset - self.start
                made[part.identity] = families[part.family].as_strided(part.shape, part.stride, offset)
            yield part.at, made[part.identity]


def stretches(leaves: Sequence[Any], is_changed: Callable[[int], bool], fqn: str) -> list[Stretch]:
    """The memory in which several of the arguments of a block lie, of which it changes one.

    Args:
        is_changed: Tells by its index whether an argument may change.

    Raises:
        StepError: they have different dtypes.
    """
    plain = [(i, leaf) for i, leaf in enumerate(leaves) if _has_memory(leaf)]
    plain.sort(key=lambda pair: (storage_of(pair[1]), _span(pair[1])))
    found = []
    for _, sharing in groupby(plain, key=lambda pair: storage_of(pair[1])):
        for near in _overlapping([*sharing]):
            if len(near) > 1 and any(is_changed(i) for i, _ in near):
                found.append(_stretch(near, fqn))
    return found


def _has_memory(leaf: Any) -> bool:
    return type(leaf) is Tensor and storage_of(leaf) is not None and leaf.numel() > 0


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte in its storage, and that behind the last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + (last + 1) * tensor.itemsize


def _overlapping(sharing: Sequence[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """Tensors of one storage, by where they begin, in groups that have no memory in common."""
    group: list[tuple[int, Tensor]] = []
    end = 0
    for i, tensor in sharing:
        first, behind = _span(tensor)
        if group and first >= end:
            yield group
            group = []
        group.append((i, tensor))
        end = max(end, behind)
    yield group


def _stretch(near: Sequence[tuple[int, Tensor]], fqn: str) -> Stretch:
    dtypes = {tensor.dtype for _, tensor in near}
    if len(dtypes) > 1:
        raise StepError(
            f"{fqn} changes an argument in place that lies in the memory of another one of another dtype"
            f" ({', '.join(sorted(map(str, dtypes)))}), so that its forward can't be computed again. Give it a clone of"
            " one of them, or leave the block out of activations.blocks."
        )
    spans = [_span(tensor) for _, tensor in near]
    start, end = min(first for first, _ in spans), max(behind for _, behind in spans)
    size = near[0][1].itemsize
    return Stretch(parts=[_part(*pair) for pair in near], start=start // size, length=(end - start) // size)


def _part(at: int, tensor: Tensor) -> _Part:
    base = base_of(tensor)
    family = id(tensor if base is None else base)
    shape, stride, offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())
    return _Part(at, id(tensor), family, shape, stride, offset, tensor.requires_grad)
