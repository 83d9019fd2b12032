"""Outputs of a block besides its return value: tensors that it leaves in attributes, and what forward hooks see.

[Note: side outputs]
A mixture of experts leaves its auxiliary loss in ``self.aux_loss``; a model collects hidden states or router logits by
forward hooks on its layers. Glue reads both, on the last stage, where the block may be absent. So both count as outputs
of the block: they become ghosts where it is absent and cross the boundaries if a later stage uses them. While a block
runs, forward hooks on it and on the modules inside of it are only noted; they are called in glue, on every stage alike.
A hook that returns something, or writes to its tensors, changes an output inside of the block; it stays there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from lightning_3d.model.block_runner import AnyCallable, is_own
from lightning_3d.model.containers import refill
from lightning_3d.model.pytrees import argument_containers, changed_containers, holds_tensors, is_same
from lightning_3d.torch_internals.modules import (
    TORCH_ATTRIBUTES,
    forward_hooks,
    forward_hooks_copied,
    forward_hooks_with_kwargs,
    observer_registries,
)
from lightning_3d.torch_internals.pytree import Args, Arguments, Kwargs

Hook = Callable[[nn.Module, Args, Kwargs, object], object]
"""A forward hook: (module, args, kwargs, output) -> another output, or None."""


@dataclass(frozen=True, kw_only=True)
class HookCall:
    """A call of a forward hook on a module inside of a block."""

    module: str
    """Name of the hooked module in the block."""
    hook: int
    """Position among ``user_hooks`` of the module."""


@dataclass(frozen=True, kw_only=True)
class SideOutputs:
    """Outputs of one call of a block besides its return value."""

    attributes: tuple[str, ...] = ()
    """Names in the block of the attributes that its forward sets to something with tensors."""
    containers: tuple[int, ...] = ()
    """Lists and dicts among its arguments that it changes, by their place in ``argument_containers``."""
    hooks: tuple[HookCall, ...] = ()
    """The forward hooks inside of it, in the order of their calls."""


@dataclass(frozen=True, kw_only=True)
class Noted:
    """A call of a forward hook that was not made."""

    call: HookCall
    values: tuple[object, ...]
    """Its arguments: those of the module, its keyword arguments and its output."""


def run_and_pack(
    block: nn.Module, kept: frozenset[HookCall], arguments: Arguments, call: AnyCallable
) -> tuple[object, SideOutputs]:
    """Run a block and collect all that it gives.

    Args:
        kept: Forward hooks inside of it that are called as always.
        arguments: (args, kwargs) to give to ``call``.

    Returns:
        A pytree of what it returned and of its side outputs, and what the latter are.
    """
    before = attributes_of(block)
    with hooks_noted(block, kept) as noted:
        packed, side, _ = packed_run(block, before, noted, arguments, call)
    return packed, side


def packed_run(
    block: nn.Module, before: dict[str, Attribute], noted: Sequence[Noted], arguments: Arguments, call: AnyCallable
) -> tuple[object, SideOutputs, frozenset[str]]:
    """The same where hooks are noted already.

    Args:
        before: Its attributes.
        noted: Fills while it runs.

    Returns:
        Also the names of the attributes that it changed otherwise than to something with tensors.
    """
    containers = argument_containers(*arguments)
    contents = [container.copy() for container in containers]
    output = call(*arguments)
    tensors, others = changed_attributes(block, before)
    side = SideOutputs(
        attributes=tensors,
        containers=changed_containers(containers, contents),
        hooks=tuple(note.call for note in noted),
    )
    return pack_outputs(block, output, arguments, side, noted), side, others


def pack_outputs(
    block: nn.Module, output: object, arguments: Arguments, side: SideOutputs, noted: Sequence[Noted]
) -> object:
    """Join the return value of a call and its side outputs to one pytree."""
    attributes = tuple(get_attribute(block, name) for name in side.attributes)
    containers = argument_containers(*arguments) if side.containers else []
    return output, attributes, tuple(containers[i] for i in side.containers), tuple(note.values for note in noted)


def unpack_outputs(
    block: nn.Module, packed: Any, arguments: Arguments, side: SideOutputs
) -> tuple[object, tuple[Args, ...]]:
    """Put what ``pack_outputs`` collected in its place.

    Args:
        arguments: Those that the user's code called the block with.

    Returns:
        What the block returned, and the arguments of the forward hooks to call.
    """
    output, attributes, contents, hook_values = packed
    for name, value in zip(side.attributes, attributes, strict=True):
        set_attribute(block, name, value)
    containers = argument_containers(*arguments) if side.containers else []
    for i, content in zip(side.containers, contents, strict=True):
        refill(containers[i], content)
    return output, hook_values


# ---- forward hooks


@contextmanager
def hooks_noted(block: nn.Module, kept: frozenset[HookCall]) -> Iterator[list[Noted]]:
    """Note the calls of the user's forward hooks inside of ``block`` instead of making them; skip those on it.

    Args:
        kept: Hooks that are called as always.

    Yields:
        A list that fills while the block runs.
    """
    noted: list[Noted] = []
    with hooks_replaced(block, kept, lambda call, _: partial(_note_into, noted, call)):
        yield noted


@contextmanager
def hooks_replaced(
    block: nn.Module, kept: frozenset[HookCall], replace: Callable[[HookCall, Hook], Hook]
) -> Iterator[None]:
    """Let others take the place of the user's forward hooks inside of ``block``, and none of those on it.

    Args:
        kept: Hooks that are called as always.
        replace: Gives what is called in the place of a hook.
    """
    copies = ExitStack()
    for name, module in block.named_modules():
        if not forward_hooks(module):  # of most: this runs in every call of a block
            continue
        calls = {key: HookCall(module=name, hook=i) for i, key in enumerate(user_hooks(module))}
        calls = {key: call for key, call in calls.items() if call not in kept}
        if calls:
            copies.enter_context(forward_hooks_copied(module))
        for key, call in calls.items():
            if module is block:
                del forward_hooks(module)[key]
            else:
                forward_hooks(module)[key] = replace(call, _call_of(module, key))
                forward_hooks_with_kwargs(module)[key] = True
    try:
        yield
    finally:
        copies.close()


def _note_into(
    noted: list[Noted],
    call: HookCall,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    output: object,
) -> None:
    noted.append(Noted(call=call, values=(args, kwargs, output)))


def user_hooks(module: nn.Module) -> list[int]:
    """Keys of the forward hooks that neither torch's parallel modules nor this package registered."""
    return [key for key, hook in forward_hooks(module).items() if not is_own(getattr(hook, "__module__", ""))]


def has_user_hooks(module: nn.Module) -> bool:
    """Whether the user registered forward hooks on a module, or hooks before its forward."""
    hooks = [hook for registry in observer_registries(module) for hook in registry.values()]
    return any(not is_own(getattr(hook, "__module__", "")) for hook in hooks)


def call_hook(block: nn.Module, call: HookCall, values: Sequence[Any]) -> object:
    """Make a call of a hook that was noted; returns what the hook returns."""
    module = block.get_submodule(call.module)
    return _call_of(module, user_hooks(module)[call.hook])(module, *values)


def call_own_hooks(block: nn.Module, args: Args, kwargs: Kwargs, output: object) -> object:
    """Call the user's forward hooks on the block itself; returns the output that they leave."""
    for key in user_hooks(block):
        changed = _call_of(block, key)(block, args, kwargs, output)
        output = output if changed is None else changed
    return output


def _call_of(module: nn.Module, key: int) -> Hook:
    return partial(_call_hook, forward_hooks(module)[key], key in forward_hooks_with_kwargs(module))


def _call_hook(
    hook: Callable[..., object],
    with_kwargs: bool,
    module: nn.Module,
    args: Args,
    kwargs: Kwargs,
    output: object,
) -> object:
    return hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)


# ---- attributes


@dataclass(frozen=True, kw_only=True)
class Attribute:
    """The value of an attribute at some time."""

    value: object
    content: object
    """A shallow copy of a list, dict or set; else the value."""


@contextmanager
def attributes_kept(blocks: Mapping[str, nn.Module], calls: Iterable[tuple[str, SideOutputs]]) -> Iterator[None]:
    """Give blocks back afterwards the attributes that are outputs of theirs.

    Args:
        blocks: FQN -> block.
        calls: FQN of the block and side outputs of each call inside.
    """
    with ExitStack() as stack:
        for fqn, name in {(fqn, name) for fqn, side in calls for name in side.attributes}:
            path, _, attribute = name.rpartition(".")
            owner = vars(blocks[fqn].get_submodule(path))
            undo = (
                partial(owner.update, {attribute: owner[attribute]})
                if attribute in owner
                else partial(owner.pop, attribute, None)
            )
            stack.callback(undo)
        yield


def attributes_of(block: nn.Module) -> dict[str, Attribute]:
    """All attributes of the block and of the modules inside of it, but for torch's own, by their names in the block."""
    return {
        f"{prefix}.{name}" if prefix else name: Attribute(
            value=value, content=value.copy() if isinstance(value, (list, dict, set)) else value
        )
        for prefix, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in TORCH_ATTRIBUTES
    }


def changed_attributes(block: nn.Module, before: dict[str, Attribute]) -> tuple[tuple[str, ...], frozenset[str]]:
    """Find the attributes that a call changed.

    Args:
        before: ``attributes_of(block)`` before the call.

    Returns:
        Names of the attributes that were set to something with tensors, and of those changed otherwise.
    """
    set_to_tensors, others = [], set()
    for name, now in attributes_of(block).items():
        old = before.get(name)
        if old is not None and is_same(old.content, now.content):
            continue
        is_set = old is None or old.value is not now.value
        if is_set and holds_tensors(now.value):
            set_to_tensors.append(name)
        else:
            others.add(name)
    return tuple(set_to_tensors), frozenset(others)


def get_attribute(block: nn.Module, name: str) -> object:
    """Value of an attribute by its name from ``attributes_of``."""
    path, _, attribute = name.rpartition(".")
    return vars(block.get_submodule(path))[attribute]


def set_attribute(block: nn.Module, name: str, value: object) -> None:
    """Set an attribute by its name from ``attributes_of``."""
    path, _, attribute = name.rpartition(".")
    vars(block.get_submodule(path))[attribute] = value
