"""Kinds of blocks: those of one kind are built alike, cost the same and, with equal attributes, compute the same."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType

import torch
from torch import Tensor, nn

from lightning_3d.model.block_runner import BlockRunner
from lightning_3d.torch_internals.modules import TORCH_ATTRIBUTES

_BY_VALUE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_BY_IDENTITY = (type, FunctionType, BuiltinFunctionType)


def kind_of(block: nn.Module) -> Hashable:
    """Equal for blocks of the same class, structure and parameters, which cost the same."""
    parameters = tuple((fqn, tuple(p.shape), p.dtype, p.requires_grad) for fqn, p in block.named_parameters())
    return type(block).__module__, type(block).__qualname__, repr(block), parameters


@dataclass(frozen=True, eq=False, slots=True)
class Identity:
    """Equal for blocks of one kind that have equal attributes, too, and so compute the same."""

    kind: Hashable

    attributes: tuple[tuple[str, str, Hashable, bool], ...]
    """Path of the module, name, value, and whether that is the block's own place among its siblings, as `layer_idx`
    is: it counts as equal for all of them. A number may be so by chance, where in another block it is just equal."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Identity) or self.kind != other.kind or len(self.attributes) != len(other.attributes):
            return False
        pairs = zip(self.attributes, other.attributes, strict=True)
        return all(one[:2] == two[:2] and (one[2] == two[2] or (one[3] and two[3])) for one, two in pairs)

    def __hash__(self) -> int:
        return hash((self.kind, tuple((path, name) for path, name, _, _ in self.attributes)))


def identity_of(fqn: str, block: nn.Module) -> Identity:
    """A key that blocks have in common which compute the same."""
    places = {int(part) for part in fqn.split(".") if part.isdecimal()}
    attributes = tuple(
        (path, name, _key(value), type(value) is int and value in places)
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in TORCH_ATTRIBUTES and not isinstance(value, BlockRunner)
    )
    return Identity(kind_of(block), attributes)


def _key(value: object) -> Hashable:
    """Equal for values that compute the same, as far as planning can tell."""
    if isinstance(value, _BY_VALUE):
        return type(value), value
    if isinstance(value, _BY_IDENTITY):
        return value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, partial):
        return _key(value.func), _key(value.args), _key(value.keywords)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_key, value))
    if isinstance(value, dict):
        return type(value), tuple((str(key), _key(entry)) for key, entry in value.items())
    content = getattr(value, "__dict__", {})  # a config
    return type(value), tuple((name, entry) for name, entry in content.items() if isinstance(entry, _BY_VALUE))
