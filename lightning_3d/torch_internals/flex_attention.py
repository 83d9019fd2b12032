"""FlexAttention as a function of tensors: its operands, and those that its score and mask functions capture.

torch finds what these capture by Dynamo. Where users' code runs eagerly nothing would, and what is captured would get
no gradient. Here it is found by a walk through closures, and given to torch beside the operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field, replace
from dis import get_instructions
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from lightning_3d.torch_internals.capture import is_captured
from lightning_3d.torch_internals.dispatch import no_dispatch_modes
from lightning_3d.torch_internals.dynamo import users_compiler
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.function_calls import calls_answered, copy_of
from lightning_3d.torch_internals.patches import replaced

__all__ = [
    "BlockMask",
    "FlexOptions",
    "calls_seen",
    "calls_unseen",
    "flex_attention",
    "with_heads",
    "with_mask_mod",
    "with_rows",
]

Mod = Callable[..., Tensor]
"""A score or mask function."""

_TORCHS = copy_of(flex.flex_attention)


@dataclass(frozen=True, kw_only=True, slots=True)
class FlexOptions:
    """The arguments of ``flex_attention`` that are no operands, by the same names."""

    score_mod: Mod | None = field(default=None, repr=False)
    block_mask: BlockMask | None = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: dict[str, Any] | None = None
    return_aux: Any = None

    places: tuple[int, ...] = field(default=(), repr=False)
    """The ids of the tensors that the functions capture, and that `flex_attention` gets."""

    def with_captured(self, change: Callable[[Tensor], Tensor]) -> FlexOptions:
        """The same with other tensors in its functions."""
        mask = self.block_mask
        if mask is not None:
            mask = with_mask_mod(mask, with_captured(mask.mask_mod, change))
        return replace(self, score_mod=with_captured(self.score_mod, change), block_mask=mask)

    def given(self, captured: Sequence[Tensor]) -> FlexOptions:
        """The same with these tensors in the `places`."""
        new = dict(zip(self.places, captured, strict=True))
        return self.with_captured(lambda tensor: new.get(id(tensor), tensor)) if new else self


def calls_seen() -> AbstractContextManager[None]:
    """Let calls of torch's ``flex_attention`` be calls of the one below inside, whoever makes them."""
    if flex.flex_attention.__code__ is not _TORCHS.__code__:
        return nullcontext()  # they are

    def answer(caller: str, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        return _called(*args, **kwargs)

    return calls_answered([flex.flex_attention], answer)


@contextmanager
def calls_unseen() -> Iterator[None]:
    """Let them be calls of torch's own inside, as a compiler is to follow it."""
    code = flex.flex_attention.__code__
    flex.flex_attention.__code__ = _TORCHS.__code__
    try:
        yield
    finally:
        flex.flex_attention.__code__ = code


def _called(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    options = FlexOptions(**dict(zip(_POSITIONAL, args, strict=False)), **kwargs)
    captured: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        if type(tensor) not in _PLAIN or (tensor.requires_grad and torch.is_grad_enabled()):
            captured[id(tensor)] = tensor
        return tensor

    options.with_captured(note)
    return flex_attention(query, key, value, tuple(captured.values()), replace(options, places=tuple(captured)))


_POSITIONAL = ("score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options")

_PLAIN = (Tensor, nn.Parameter, nn.Buffer, FakeTensor)


def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, captured: tuple[Tensor, ...], options: FlexOptions
) -> Any:
    """Attention, as torch's function of that name gives it: fused where the user has compiled the call.

    Args:
        query: ``[batch, heads, queries, head_dim]``.
        key: ``[batch, kv_heads, keys, head_dim]``.
        value: ``[batch, kv_heads, keys, value_dim]``.
        captured: Tensors that the functions among `options` capture.
        options: All else.
    """
    operands = (query, key, value, *captured)
    if has_torch_function(operands):
        return handle_torch_function(flex_attention, operands, query, key, value, captured, options)
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in operands):
        return _on_stand_ins(query, key, value, captured, options)
    compile = None if is_captured(query) else users_compiler()
    if compile is None:
        return _unfused(query, key, value, captured, options)
    with no_dispatch_modes(), torch.compiler.set_stance("default"):  # a recomputation makes the call again
        return compile(_TORCHS)(query, key, value, **_keywords(options.given(captured)))


def _unfused(query: Tensor, key: Tensor, value: Tensor, captured: tuple[Tensor, ...], options: FlexOptions) -> Any:
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        """The same data for the backward, which calls the functions again, whatever attributes are then."""
        return kept.setdefault(id(tensor), tensor.detach())

    own = options.given(captured).with_captured(keep)
    of_scores = replace(own, block_mask=None, places=tuple(id(kept[id(tensor)]) for tensor in captured))

    def scored(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        score_mod = of_scores.given(given).score_mod
        for tensor in given:  # torch wants a gradient of each, and not all that has a name in the code is read
            score = torch.where(k < 0, tensor[(k * 0,) * tensor.dim()], score)
        return score if score_mod is None else score_mod(score, b, h, q, k)

    return _without_dynamo(query, key, value, captured, replace(own, score_mod=scored))


def _on_stand_ins(query: Tensor, key: Tensor, value: Tensor, captured: tuple[Tensor, ...], options: FlexOptions) -> Any:
    """The same without the functions of the user, who may have made them of stand-ins of another kind."""

    def scored(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        for tensor in given:
            score = score + tensor.sum()
        return score

    return _without_dynamo(query, key, value, captured, replace(options, score_mod=scored, block_mask=None))


def _without_dynamo(
    query: Tensor, key: Tensor, value: Tensor, captured: tuple[Tensor, ...], options: FlexOptions
) -> Any:
    with replaced("FlexAttention", flex, {"_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True}), _Giving(captured):
        return _TORCHS(query, key, value, **_keywords(options))


class _Giving(TorchFunctionMode):
    """Gives the operator behind the function what the score function captures."""

    def __init__(self, captured: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._captured = captured

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.higher_order.flex_attention:
            args = (*args[:7], self._captured, ())
        return func(*args, **kwargs or {})


def _keywords(options: FlexOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in (*_POSITIONAL, "return_aux")}


# ------------------------------------------------------------------------------------------------------ block masks


def with_mask_mod(mask: BlockMask, mask_mod: Mod) -> BlockMask:
    """A block mask of the same blocks with another function."""
    if mask_mod is mask.mask_mod:
        return mask
    mask = copy(mask)
    mask.mask_mod = mask_mod
    return mask


def with_heads(mask: BlockMask, first: int, num: int) -> BlockMask:
    """The part of a block mask for some of its heads."""
    mask = copy(mask)
    for name, value in vars(mask).items():
        if isinstance(value, Tensor) and value.shape[1] > 1:
            setattr(mask, name, value.narrow(1, first, num))
    return mask


def with_rows(mask: BlockMask, first: int, num: int) -> BlockMask:
    """The part of a block mask for some queries, which are whole blocks of it."""
    size, num_keys = mask.BLOCK_SIZE[0], mask.seq_lengths[1]

    def own(part: Tensor | None) -> Any:
        return None if part is None else part.narrow(2, first // size, -(-num // size))

    return BlockMask.from_kv_blocks(
        own(mask.kv_num_blocks),
        own(mask.kv_indices),
        own(mask.full_kv_num_blocks),
        own(mask.full_kv_indices),
        BLOCK_SIZE=mask.BLOCK_SIZE,
        mask_mod=mask.mask_mod,
        seq_lengths=(num, num_keys),
    )


# ----------------------------------------------------------------------------------------------- what is captured


def with_captured(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A function with other tensors in what it captures; the same function where no tensor becomes another.

    Closures are followed, partial applications, methods, functions that it calls, and by the names in its code the
    attributes of modules and objects.
    """
    return _Captured(change).of(value, frozenset())


class _Captured:
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self._change = change
        self._made: dict[tuple[int, frozenset[str]], Any] = {}

    def of(self, value: Any, names: frozenset[str]) -> Any:
        """A value with other tensors in it.

        Args:
            names: In the code that has it.
        """
        if isinstance(value, Tensor):
            return self._change(value)
        if value is None or isinstance(value, (str, int, float, type, ModuleType, torch.dtype, torch.device)):
            return value
        key = (id(value), names)
        if key not in self._made:
            self._made[key] = value  # in the meantime, as functions may call themselves
            self._made[key] = self._of_object(value, names)
        return self._made[key]

    def _of_object(self, value: Any, names: frozenset[str]) -> Any:
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, MethodType):
            function = self.of(value.__func__, names)
            owner = self.of(value.__self__, _names(value.__func__))
            return value if function is value.__func__ and owner is value.__self__ else MethodType(function, owner)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            func, args, keywords = new = [self.of(part, names) for part in parts]
            return value if all(map(is_, new, parts)) else partial(func, *args, **keywords)
        if isinstance(value, (tuple, list)):
            new = [self.of(item, names) for item in value]
            return value if all(map(is_, new, value)) else type(value)(new)
        if isinstance(value, dict):
            changed = {key: self.of(item, names) for key, item in value.items()}
            return value if all(map(is_, changed.values(), value.values())) else changed
        return self._of_attributes(value, names)

    def _of_function(self, function: FunctionType) -> FunctionType:
        names = _names(function)
        cells = function.__closure__ or ()
        contents = [cell.cell_contents for cell in cells]
        new = [self.of(content, names) for content in contents]
        known = {name: function.__globals__[name] for name in _globals(function) if name in function.__globals__}
        others = {name: made for name, item in known.items() if (made := self.of(item, names)) is not item}
        defaults = self.of(function.__defaults__, names)
        if not others and defaults is function.__defaults__ and all(map(is_, new, contents)):
            return function
        scope = {**function.__globals__, **others} if others else function.__globals__
        made = FunctionType(function.__code__, scope, function.__name__, defaults, tuple(map(CellType, new)))
        made.__kwdefaults__ = function.__kwdefaults__
        return made

    def _of_attributes(self, value: Any, names: frozenset[str]) -> Any:
        known = {name: getattr(value, name) for name in names if name in _attributes(value)}
        new = {name: self.of(item, names) for name, item in known.items()}
        return value if all(map(is_, new.values(), known.values())) else SimpleNamespace(**new)


def _attributes(value: Any) -> set[str]:
    """The names of what an object holds, and of its class's methods."""
    held = [vars(value)] if hasattr(value, "__dict__") else []
    if isinstance(value, nn.Module):
        held += [value._parameters, value._buffers, value._modules]
    methods = {name for name, item in vars(type(value)).items() if isinstance(item, FunctionType)}
    return methods.union(*held)


def _names(function: Any) -> frozenset[str]:
    """The names in the code of a function, those of attributes among them."""
    return frozenset[str]().union(*(code.co_names for code in _codes(function)))


def _globals(function: Any) -> set[str]:
    return {step.argval for code in _codes(function) for step in get_instructions(code) if step.opname == "LOAD_GLOBAL"}


def _codes(function: Any) -> list[CodeType]:
    """The code of a function, and of functions in it."""
    code: CodeType = function.__code__
    return [code, *(const for const in code.co_consts if isinstance(const, CodeType))]
