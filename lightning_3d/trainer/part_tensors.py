"""Parameters of which each rank holds a part, in the hands of code that takes them for whole.

They are DTensors, of which Python's ``float()`` gives a rank's own number, ``parameter.data = ...`` changes nothing,
and random numbers are the same on every shard. A `PartTensor` is one that user code may take for the whole:

    about it              its shape, dtype, hooks, ...      answered by each rank
    element by element    a.mul_(0.9).add_(b), a.clone()    computed on the parts, which stay parts; of plain tensors
                                                            each rank takes its part
    a backward            torch.autograd.grad(y, a)         gradients of parts, as parts
    everything else       a.norm(), F.linear(x, a), a[0]    gathered, and computed on the whole by all ranks, who meet
                                                            first; what is changed in it goes back to the parts

Steps compute with the parts that tensor parallel makes; those of ZeRO stage 3 they gather wherever they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from lightning_3d.checkpoint.box import fill, full_value
from lightning_3d.errors import StepError
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.tensor.placement import ORDER, Parts, marked
from lightning_3d.torch_internals.dispatch import GET_DATA, SET_DATA, DisableTorchFunctionSubclass, is_in_place
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from lightning_3d.torch_internals.tensors import storage_id, version_of
from lightning_3d.zero.attributes import OWN_PREFIX, users_attributes
from lightning_3d.zero.outside_reads import for_steps, mark_whole, whole_of

_ABOUT = {  # what a parameter says of itself without its values
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.stride, Tensor.__hash__, Tensor.__repr__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.register_hook, Tensor.__deepcopy__),
    *(Tensor.nelement, Tensor.ndimension, Tensor.element_size, Tensor.is_contiguous, Tensor.get_device),
    *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage_offset, Tensor.register_post_accumulate_grad_hook),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_VALUE_GETTERS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_ALIASES = {Tensor.detach, torch.detach, GET_DATA}
"""Functions that give the same values under another name."""
_GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]  # a getset descriptor
_SET_GRAD = Tensor.grad.__set__  # type: ignore[union-attr]
_DIFFERENTIATE = frozenset({torch.autograd.grad, torch.autograd.backward, Tensor.backward})
_MAX_FUNCTIONS = 4096

_ARITHMETIC = {
    *("abs", "neg", "add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "truediv", "pow"),
    *("sqrt", "rsqrt", "square", "exp", "log", "sign", "reciprocal", "lerp", "addcmul", "addcdiv", "clamp", "clip"),
    *("clamp_min", "clamp_max", "maximum", "minimum", "where", "masked_fill", "nan_to_num", "sigmoid", "tanh", "relu"),
}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "logical_not", "invert", "and", "or"}
_MAKING = {"clone", "contiguous", "copy", "zero", "fill", "empty_like", "zeros_like", "ones_like", "full_like"}
_CONVERTING = {"to", "cpu", "cuda", "float", "double", "half", "bfloat16", "bool", "type_as"}

_ELEMENTWISE = _ARITHMETIC | _COMPARISONS | _MAKING | _CONVERTING
"""Names of functions that compute each element of their result from the same element of their arguments."""


_PART, _GATHERED = f"{OWN_PREFIX}part", f"{OWN_PREFIX}gathered"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor that lies in parts on several ranks."""

    fqn: str
    """Names the parameter that it is, or comes from."""
    parts: Parts | None
    """How its features are grouped."""
    rendezvous: Rendezvous

    def __deepcopy__(self, memo: dict[int, Any]) -> _Part:
        return self

    def whole(self, tensor: DTensor) -> Tensor:
        """The full value in its original order; every rank that has a part calls it."""
        if not all(placement.is_replicate() for placement in tensor.placements):
            self.rendezvous.meet(tensor.device_mesh.mesh.flatten().tolist(), f"a use of {self.fqn}")
        is_followed = torch.is_grad_enabled() and tensor.requires_grad and tensor.device_mesh.ndim == 1
        full = tensor.full_tensor() if is_followed else full_value(tensor)
        return (full if self.parts is None else self.parts.ungrouped(full)).to(tensor.device)

    def take(self, tensor: DTensor, whole: Tensor) -> None:
        """Give each rank its part of a full value."""
        fill(tensor.detach(), whole.detach(), self.parts)

    def like(self, tensor: DTensor, whole: Tensor) -> DTensor:
        """A full value in parts as those of a tensor."""
        placed = torch.empty_like(tensor, dtype=whole.dtype, requires_grad=False)
        assert isinstance(placed, DTensor)
        self.take(placed, whole)
        return placed

    def grouped(self, value: Tensor, shape: torch.Size) -> Tensor:
        """A full value that is computed with parts of this shape, in their order."""
        if self.parts is None:
            return value
        dim = self.parts.dim % len(shape) - len(shape)
        is_along = value.dim() >= -dim and value.shape[dim] == shape[dim]
        return self.parts.at(value.dim() + dim).grouped(value) if is_along else value


class PartTensor(DTensor):
    """A parameter of which this rank has a part, or what was computed from it element by element."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, types, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with DisableTorchFunctionSubclass():
            copied: Any = self.detach().clone()
            if isinstance(self, nn.Parameter):
                copied = nn.Parameter(copied, self.requires_grad)
        vars(copied).update(users_attributes(self))
        return _watched(copied, _part_of(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        with DisableTorchFunctionSubclass():
            same = self.detach()
            return (nn.Parameter(same, self.requires_grad) if isinstance(self, nn.Parameter) else same).__reduce_ex__(
                protocol
            )


def watch_parts(module: nn.Module, rendezvous: Rendezvous) -> None:
    """Let user code read and change the module's parameters of which this rank has a part."""
    parts = marked(module)
    for fqn, tensor, _ in named_state(module):
        if isinstance(tensor, DTensor):
            _watched(tensor, _Part(fqn=fqn, parts=parts.get(fqn), rendezvous=rendezvous))


def _watched(tensor: DTensor, part: _Part) -> DTensor:
    tensor.__class__ = PartTensor
    vars(tensor).update({_PART: part, ORDER: part.parts})
    return tensor


def _as_part(result: DTensor, tensor: PartTensor) -> DTensor:
    """Let what comes of a part be one."""
    _watched(result, _part_of(tensor))
    whole = whole_of(tensor)
    if whole is not None and whole.reads.is_on:
        mark_whole(result, whole)
    return result


def _is_read(leaf: Any) -> bool:
    """Whether a step runs that computes with the full value of a part."""
    whole = whole_of(leaf)
    return whole is not None and whole.reads.is_on


@lru_cache(_MAX_FUNCTIONS)
def _is_about(func: Any) -> bool:
    """Whether a function asks for what a parameter says of itself without its values, or for its gradient."""
    name = _name(func)
    if name in ("__get__", "__set__"):
        return func not in _VALUE_GETTERS and func not in _ALIASES and func != SET_DATA
    return func in _ABOUT


def _answer(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    is_about = _is_about(func)
    if is_about and len(types) == 1:  # of its first argument; optimizers and FSDP2 ask that all the time
        with DisableTorchFunctionSubclass():
            return _answered(func, args, kwargs)
    leaves, spec = tree_flatten((args, kwargs))
    if _is_of_stages(types, leaves):
        return NotImplemented
    is_read = any(map(_is_read, leaves))
    if is_read and not (is_about or func in _ALIASES or _writes(func, args, kwargs)):
        args, kwargs = tree_unflatten(list(map(for_steps, leaves)), spec)
        return func(*args, **kwargs)
    first = next(leaf for leaf in leaves if isinstance(leaf, PartTensor))
    part = _part_of(first)
    with DisableTorchFunctionSubclass():
        if func in _DIFFERENTIATE:
            return _differentiated(func, args, kwargs)
        if is_about or func in _ALIASES:
            return _answered(func, args, kwargs)
        if part.rendezvous.is_agreed and not is_read:
            return func(*args, **kwargs)
        if _foreach_stays(func, args, kwargs):
            with implicit_replication():  # of tensors that lie whole on each rank
                return func(*args, **kwargs)
        if func == SET_DATA and isinstance(args[0], PartTensor):
            return _set_data(*args)
        if _can_stay(func, args, first, leaves):
            leaves = [part.grouped(leaf, first.shape) if _is_plain(leaf) else leaf for leaf in leaves]
            args, kwargs = tree_unflatten(leaves, spec)
            with implicit_replication():
                return tree_map_only(DTensor, lambda result: _as_part(result, first), func(*args, **kwargs))
    return _on_wholes(func, args, kwargs)


def _is_of_stages(types: Any, leaves: Sequence[Any]) -> bool:
    """Whether some of it lies on another pipeline stage, and answers for itself."""
    return len(types) > 1 and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves)


def _writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes a part in place."""
    changed = args[:1] if is_in_place(_name(func)) or func == SET_DATA else kwargs.get("out")
    return any(isinstance(leaf, PartTensor) for leaf in tree_leaves(changed))


class GatheredView(Tensor):
    """A view of a parameter's gathered value; what is changed in it goes back to the parts."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if _is_of_stages(types, leaves):
            return NotImplemented
        gathered = [_gathered(leaf) for leaf in leaves if isinstance(leaf, GatheredView)]
        versions = [version_of(entry.whole) for entry in gathered]
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        for entry, version in zip(gathered, versions, strict=True):
            if version_of(entry.whole) != version:
                entry.write_back()
            result = entry.views_of(result)
        return result

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gathered:
    """A part and its whole, which user code computes with."""

    tensor: DTensor
    whole: Tensor

    def write_back(self) -> None:
        """Take over what was changed."""
        with torch.no_grad(), DisableTorchFunctionSubclass():
            _part_of(self.tensor).take(self.tensor, self.whole)

    def views_of(self, result: Any) -> Any:
        """Let what shares memory with the whole write back."""
        storage = storage_id(self.whole.untyped_storage())

        def shown(leaf: Tensor) -> Tensor:
            if type(leaf) is not Tensor or leaf.requires_grad or storage_id(leaf.untyped_storage()) != storage:
                return leaf
            view = leaf.as_subclass(GatheredView)
            vars(view)[_GATHERED] = self
            return view

        with DisableTorchFunctionSubclass():
            return tree_map_only(Tensor, shown, result)


def _part_of(tensor: Tensor) -> _Part:
    part: _Part = vars(tensor)[_PART]
    return part


def _gathered(view: GatheredView) -> _Gathered:
    gathered: _Gathered = vars(view)[_GATHERED]
    return gathered


def _answered(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Answer what is about a part, or gives the part itself."""
    tensor = args[0]
    if not isinstance(tensor, PartTensor) or (_is_read(tensor) and func not in _ALIASES):
        return func(*args, **kwargs)
    part = _part_of(tensor)
    if func == _SET_GRAD and _is_plain(args[1]):
        return func(tensor, _as_part(part.like(tensor, args[1]), tensor))
    result = func(*args, **kwargs)
    is_part = isinstance(result, DTensor) and (func in _ALIASES or func == _GET_GRAD)
    return _as_part(result, tensor) if is_part else result


@torch.no_grad()
def _set_data(tensor: DTensor, values: Tensor) -> None:
    """Take values over: DTensors keep theirs in another tensor, which ``data`` does not reach."""
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise StepError(
            f"{_part_of(tensor).fqn}.data was set to a tensor of shape {tuple(values.shape)} and {values.dtype}, but"
            f" each rank has a part of its {tuple(tensor.shape)} in {tensor.dtype}. Give it one of that shape and"
            " dtype."
        )
    if isinstance(values, DTensor):
        tensor.copy_(values)
    else:
        _part_of(tensor).take(tensor, values)


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)


def _can_stay(func: Any, args: Sequence[Any], first: DTensor, leaves: Sequence[Any]) -> bool:
    """Whether a function can be computed on parts."""
    if not _is_elementwise(func) or (is_in_place(_name(func)) and not (args and isinstance(args[0], PartTensor))):
        return False
    for leaf in leaves:
        if isinstance(leaf, PartTensor):
            if not _are_alike(leaf, first):
                return False
        elif isinstance(leaf, Tensor) and leaf.dim():
            if first.device_mesh.ndim > 1:
                return False
            extra = zip(reversed(leaf.shape), reversed(first.shape), strict=False)
            if leaf.dim() > first.dim() or any(size not in (1, full) for size, full in extra):
                return False
    return True


def _are_alike(one: Any, other: Any) -> bool:
    if not (isinstance(one, PartTensor) and isinstance(other, PartTensor)):
        return _is_plain(one) and _is_plain(other)
    return (one.shape, one.placements, _part_of(one).parts) == (other.shape, other.placements, _part_of(other).parts)


def _differentiated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Differentiate by parts; gradients of parts are parts."""
    results = func(*args, **kwargs)
    if func is not torch.autograd.grad:
        return results
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, Tensor) else inputs
    return tuple(
        _as_part(result, tensor) if isinstance(tensor, PartTensor) and isinstance(result, DTensor) else result
        for tensor, result in zip(inputs, results, strict=True)
    )


def _foreach_stays(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of lists, which changes the first one, can be computed on what each rank has of them."""
    if not (func.__name__.startswith("_foreach_") and _is_elementwise(func)):
        return False
    targets, *others = (given for given in (*args, *kwargs.values()) if isinstance(given, list | tuple))
    tensors = [other for other in others if any(isinstance(entry, Tensor) for entry in other)]
    return all(_are_alike(target, entry) for other in tensors for target, entry in zip(targets, other, strict=True))


def _on_wholes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    gathered: dict[int, _Gathered] = {}
    for leaf in leaves:
        if isinstance(leaf, PartTensor) and id(leaf) not in gathered:
            with DisableTorchFunctionSubclass():
                gathered[id(leaf)] = _Gathered(tensor=leaf, whole=_part_of(leaf).whole(leaf))
    wholes = [gathered[id(leaf)].whole if id(leaf) in gathered else leaf for leaf in leaves]
    whole_args, whole_kwargs = tree_unflatten(wholes, spec)
    versions = {key: version_of(entry.whole) for key, entry in gathered.items()}
    result = func(*whole_args, **whole_kwargs)
    for key, entry in gathered.items():
        if version_of(entry.whole) != versions[key]:
            entry.write_back()
        result = entry.tensor if result is entry.whole else entry.views_of(result)
    return result


def _name(func: Any) -> str:
    return getattr(func, "__name__", "")


def _is_elementwise(func: Any) -> bool:
    """Whether a function, or its form that changes its first argument, computes element by element."""
    name = _name(func)
    if name.startswith("__"):
        name = name.strip("_")
        return name in _ARITHMETIC | _COMPARISONS or name[1:] in _ARITHMETIC | _COMPARISONS  # radd, iadd
    if name.startswith("_foreach_"):
        return name.endswith("_") and name.removeprefix("_foreach_").strip("_") in _ELEMENTWISE
    return name.removesuffix("_") in _ELEMENTWISE
