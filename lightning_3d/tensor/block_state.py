"""What the forward of a block reads besides its arguments, and whether it leaves anything behind.

A compiled block repeats a computation on tensors. So its tensors are handed to it anew in every call, all other values
that its modules hold are part of what identifies the computation, and a block that does more than compute is found by
running it once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_3d.pipeline.block_call import Attribute, attributes_of, changed_attributes
from lightning_3d.rng import Generators
from lightning_3d.tensor.preserve import preserved

STATIC_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.layout)
"""Of values that compare by what they are."""

_TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
_OF_ROUTING = frozenset({"forward", "_router", "_block_fqn", "_finish"})
"""Attributes that this package sets on a block."""


class NotCompilable(Exception):
    """Why a block runs eagerly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockState:
    """Tensors and values in the modules of a block, at one time."""

    tensors: Sequence[Tensor]
    """Parameters, buffers and other tensors, each once."""

    places: Sequence[tuple[dict[str, Any], str, int]]
    """Where they are found: a module's dict, the key in it, and the index among the tensors."""

    values: tuple[Hashable, ...]
    """Everything else, comparable."""

    def replaced(self, tensors: Sequence[Tensor]) -> None:
        """Put other tensors in their places."""
        for holder, name, index in self.places:
            holder[name] = tensors[index]


class _Same:
    """Compares an object by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value


def read_state(block: nn.Module) -> BlockState:
    """Walk the modules of a block.

    Raises:
        NotCompilable: a module inside of it has hooks, which Python must call.
    """
    tensors: list[Tensor] = []
    places: list[tuple[dict[str, Any], str, int]] = []
    values: list[Any] = []
    indices: dict[int, int] = {}
    seen: set[int] = set()

    def note(holder: dict[str, Any], name: str, tensor: Tensor) -> None:
        if id(tensor) not in indices:
            indices[id(tensor)] = len(tensors)
            tensors.append(tensor)
        places.append((holder, name, indices[id(tensor)]))

    for module in _modules(block):
        if module is not block and _has_hooks(module):
            raise NotCompilable(f"{type(module).__name__} inside of it has hooks")
        attributes = vars(module)
        values += [type(module), module.training, len(attributes)]
        for holder in (module._parameters, module._buffers):
            for name, tensor in holder.items():
                if tensor is not None:
                    note(holder, name, tensor)
        for name, value in attributes.items():
            if name in _TORCH_ATTRIBUTES or (module is block and name in _OF_ROUTING):
                continue
            if isinstance(value, Tensor):
                note(attributes, name, value)
            else:
                values.append(_comparable(value, seen))
    return BlockState(tensors=tensors, places=places, values=tuple(values))


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _comparable(value: object, seen: set[int]) -> Hashable:
    """A value of an attribute: by what it is, with the content of containers and of objects such as a config."""
    if type(value) in STATIC_TYPES:
        return type(value), value
    if isinstance(value, nn.Module | type) or callable(value) or id(value) in seen:
        return _Same(value)
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), tuple([_comparable(item, seen) for item in value])
    if isinstance(value, dict):
        return type(value), tuple([(_Same(key), _comparable(item, seen)) for key, item in value.items()])
    content = getattr(value, "__dict__", {})
    return _Same(value), tuple([(n, type(v), v) for n, v in content.items() if type(v) in STATIC_TYPES])


def check_computes_only(
    block: nn.Module, run: Callable[..., Any], leaves: Sequence[Any], spec: TreeSpec, device: torch.device
) -> None:
    """Run a block on copies of its arguments; afterwards everything is as it was.

    Args:
        block: Whose attributes are watched.
        run: Its forward.
        leaves: Its flat arguments.
        spec: Their structure, (args, kwargs).
        device: Whose random numbers are watched, beside those of the CPU, of Python and of NumPy.

    Raises:
        NotCompilable: it drew random numbers, changed an argument, or an attribute other than a buffer in place.
    """
    copies = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    arguments = tree_unflatten(copies, spec)
    before, buffers = attributes_of(block), _buffers(block)
    generators = Generators(device)
    try:
        with torch.no_grad(), preserved(block), generators.preserved():
            states = generators.states()
            run(*arguments[0], **arguments[1])
            drew = not generators.are_at(states)
            overwrote = any(isinstance(leaf, Tensor) and leaf._version for leaf in copies)
            set_tensors, others = changed_attributes(block, before)
            changed = sorted({*set_tensors, *others, *_set_anew(buffers, _buffers(block))})
    finally:
        _restore_containers(before)
    if drew:
        raise NotCompilable("it draws random numbers (dropout), which would be others if it were compiled")
    if changed:
        raise NotCompilable(f"its forward changes the attributes {changed}")
    if overwrote:
        raise NotCompilable("it changes its arguments in place")
    found, found_spec = tree_flatten(arguments)
    if found_spec != spec or any(a is not b for a, b in zip(found, copies, strict=True)):
        raise NotCompilable("it changes a list or dict among its arguments")


def _buffers(block: nn.Module) -> dict[str, Tensor]:
    return dict(block.named_buffers(remove_duplicate=False))


def _set_anew(before: dict[str, Tensor], after: dict[str, Tensor]) -> Iterator[str]:
    for name in before.keys() | after.keys():
        if before.get(name) is not after.get(name):
            yield name


def _restore_containers(before: dict[str, Attribute]) -> None:
    for attribute in before.values():
        value, content = attribute.value, attribute.content
        if value is content:
            continue
        value.clear()
        if isinstance(value, list):
            value.extend(content)
        else:
            value.update(content)
