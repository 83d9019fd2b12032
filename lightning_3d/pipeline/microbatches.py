"""Splitting a batch into microbatches, and the signature that a trace is valid for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import SplitError, TooFewSamplesError
from lightning_3d.torch_internals.tensors import version_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A part of a batch."""

    batch: object
    weight: float
    """Its share of the batch's samples; the weights of a batch sum to 1."""


def batch_size(batch: object) -> int:
    """Number of samples: the common length of dimension 0 of all tensors.

    Raises:
        SplitError: there is no tensor, or two tensors differ.
    """
    found: dict[int, str] = {}
    for path, leaf in leaves_of(batch, "batch"):
        if isinstance(leaf, Tensor) and leaf.ndim > 0:
            found.setdefault(leaf.shape[0], f"{path} {tuple(leaf.shape)}")
    if len(found) != 1:
        what = "differ: " + ", ".join(found.values()) if found else "are none"
        raise SplitError(
            "A pipeline splits every tensor of a batch along dimension 0, so all must have the same length there."
            f" The tensors of this batch {what}. Make per-batch tensors buffers of the module, or give them a batch"
            " dimension in the collate function; or set pipeline.mode=inline: nothing is split, and one stage works at"
            " a time."
        )
    return next(iter(found))


def num_samples(batch: object) -> int:
    """Number of samples; 1 of a batch that can't be split."""
    try:
        return batch_size(batch)
    except SplitError:
        return 1


def split_batch(batch: object, num_microbatches: int) -> list[Microbatch]:
    """Split into ``num_microbatches`` consecutive parts whose sizes differ by at most one, larger ones first.

    Tensors are split along dimension 0, and so are lists and tuples of non-tensors that are as long as the batch
    (strings, say); everything else goes to each microbatch as it is.

    A single part is the batch itself, whatever is in it.

    Raises:
        SplitError: there are fewer samples than microbatches, or the tensors have no common length.
    """
    if num_microbatches == 1:
        return [Microbatch(batch=batch, weight=1.0)]
    size = batch_size(batch)
    if size < num_microbatches:
        raise TooFewSamplesError(
            f"A batch of {size} samples can't be split into {num_microbatches} microbatches. Raise the batch size of"
            " the dataloader (it counts per data-parallel rank), or lower pipeline.num_microbatches."
        )
    small, larger = divmod(size, num_microbatches)
    parts, start = [], 0
    for k in range(num_microbatches):
        stop = start + small + (k < larger)
        parts.append(Microbatch(batch=_slice(batch, start, stop, size), weight=(stop - start) / size))
        start = stop
    return parts


def samples_of(batch: object, start: int, stop: int) -> object:
    """The samples from ``start`` up to ``stop``, as a batch."""
    return _slice(batch, start, stop, batch_size(batch))


def map_tensors(batch: object, change: Callable[[Tensor], Tensor]) -> object:
    """The same batch with other tensors."""
    return (
        change(batch) if isinstance(batch, Tensor) else _map_children(batch, lambda child: map_tensors(child, change))
    )


def signature(batch: object) -> Hashable:
    """The signature that a trace depends on: structure, shapes, dtypes, and the values of what is not a tensor."""
    return tuple(
        (path, tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, Tensor) else (path, repr(leaf))
        for path, leaf in leaves_of(batch)
        if not isinstance(leaf, str)
    )


def _slice(tree: Any, start: int, stop: int, size: int) -> object:
    if isinstance(tree, Tensor):
        return tree[start:stop] if tree.ndim > 0 else tree
    has_entries = type(tree) in (list, tuple) and len(tree) == size
    if has_entries and not any(isinstance(leaf, Tensor) for _, leaf in leaves_of(tree)):  # one per sample
        return type(tree)(tree[start:stop])
    return _map_children(tree, lambda child: _slice(child, start, stop, size))


def leaves_of(tree: object, path: str = "") -> list[tuple[str, object]]:
    """The leaves of nested mappings, sequences and dataclasses, each with its path."""
    children = _children(tree)
    if children is None:
        return [(path, tree)]
    return [found for name, child in children for found in leaves_of(child, f"{path}{name}")]


def _children(tree: object) -> list[tuple[str, object]] | None:
    """The named parts of a container, or None for a leaf."""
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        return [(f"[{i}]", value) for i, value in enumerate(tree)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(f".{f.name}", getattr(tree, f.name)) for f in dataclasses.fields(tree)]
    return None


def _map_children(tree: object, change: Callable[[object], Any]) -> object:
    """Rebuild a container of the same type with changed parts; a leaf comes back as it is."""
    if isinstance(tree, Mapping):
        changed = {key: change(value) for key, value in tree.items()}
        return changed if type(tree) is dict else type(tree)(changed)  # type: ignore[call-arg]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(change(value) for value in tree))
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes)):
        return type(tree)(change(value) for value in tree)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed_fields = copy(tree)  # not made anew: its __init__ may need more, and change what it gets
        for field in dataclasses.fields(tree):
            object.__setattr__(changed_fields, field.name, change(getattr(tree, field.name)))
        return changed_fields
    return tree


def detached_from_inference(batch: object) -> object:
    """Copies of tensors made under ``torch.inference_mode``, which neither autograd nor DTensor takes."""
    if isinstance(batch, Tensor):
        return batch.clone() if batch.is_inference() else batch
    with torch.no_grad():
        return _map_children(batch, detached_from_inference)


def copied_batch(batch: object) -> object:
    """The same batch, for code that may change it in place."""
    return map_tensors(batch, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad))


def contents(batch: object) -> Hashable:
    """The signature of a batch, and how often each of its tensors was changed in place."""
    return signature(batch), tuple(version_of(leaf) for _, leaf in leaves_of(batch) if isinstance(leaf, Tensor))
