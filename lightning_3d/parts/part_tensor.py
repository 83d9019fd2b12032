"""Parameters of which each rank holds a part, in the hands of code that takes them for full ones.

They are DTensors, of which Python's ``float()`` gives a rank's own number, ``parameter.data = ...`` changes nothing,
and random numbers are the same on every shard. A `PartTensor` is one that user code may take for the full one:

    about it              its shape, dtype, hooks, ...      answered by each rank
    element by element    a.mul_(0.9).add_(b), a.clone()    computed on the parts, which stay parts; of plain tensors
                                                            each rank takes its part
    a backward            torch.autograd.grad(y, a)         gradients of parts, as parts
    everything else       a.norm(), F.linear(x, a), a[0]    gathered, and computed on the full value by all ranks, who
                                                            meet first; what is changed in it goes back to the parts

Blocks compute with the parts that tensor parallel makes; those of ZeRO stage 3 any step gathers where it reads them.
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
from lightning_3d.model.absent import AbsentTensor
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.parts.elementwise import is_elementwise
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.sharding.placement import ORDER, InterleavedShard, interleaved_parameters, order_of
from lightning_3d.torch_internals.dispatch import (
    GET_DATA,
    SET_DATA,
    DisableTorchFunctionSubclass,
    is_in_place,
    used_together,
)
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from lightning_3d.torch_internals.tensors import storage_id, version_of
from lightning_3d.zero.attributes import OWN_PREFIX, successor
from lightning_3d.zero.outside_reads import is_read, mark_whole, unsharded, whole_of

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

_PART, _GATHERED = f"{OWN_PREFIX}part", f"{OWN_PREFIX}gathered"


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A tensor that lies in parts on several ranks."""

    fqn: str
    """Names the parameter that it is, or comes from."""
    parts: InterleavedShard | None
    """How its features are grouped."""
    rendezvous: Rendezvous

    def full(self, tensor: DTensor) -> Tensor:
        """The full value in its original order; every rank that has a part calls it."""
        if not all(placement.is_replicate() for placement in tensor.placements):
            mesh = tensor.device_mesh
            in_steps = mesh.mesh_dim_names == ("tp",)  # whose ranks have the same samples
            self.rendezvous.sync_check(mesh.mesh.flatten().tolist(), f"a use of {self.fqn}", in_steps=in_steps)
        is_followed = torch.is_grad_enabled() and tensor.requires_grad and tensor.device_mesh.ndim == 1
        full = tensor.full_tensor() if is_followed else full_value(tensor)
        return (full if self.parts is None else self.parts.deinterleaved(full)).to(tensor.device)

    def interleaved(self, value: Tensor, shape: torch.Size) -> Tensor:
        """A full value that is computed with parts of this shape, in their order."""
        if self.parts is None:
            return value
        dim = self.parts.dim % len(shape) - len(shape)
        is_along = value.dim() >= -dim and value.shape[dim] == shape[dim]
        return self.parts.at(value.dim() + dim).interleaved(value) if is_along else value


class PartTensor(DTensor):
    """A parameter of which this rank has a part, or what was computed from it element by element."""

    @classmethod
    def __torch_function__(cls, func: AnyCallable, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        kwargs, is_about = kwargs or {}, _is_about(func)
        if is_about and len(types) == 1:  # of its first argument; optimizers and FSDP2 ask that all the time
            return _about(func, args, kwargs)
        if any(issubclass(given, AbsentTensor) for given in types):
            return NotImplemented  # it answers
        if is_about or func in _ALIASES:
            return _about(func, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        reads = any(map(is_read, leaves))
        if reads and not _writes(func, args, kwargs):
            args, kwargs = tree_unflatten(list(map(_for_steps, leaves)), spec)
            return func(*args, **kwargs)
        first = next(leaf for leaf in leaves if isinstance(leaf, PartTensor))
        part, name = _part_of(first), _name(func)
        with DisableTorchFunctionSubclass():
            if func in _DIFFERENTIATE:
                return _differentiated(func, args, kwargs)
            if func == SET_DATA and isinstance(args[0], PartTensor):
                return _set_data(*args)
            if not _stays(name, args, kwargs):
                return _on_full_values(func, args, kwargs)
            if name.startswith("_foreach_"):  # in place; DTensor has no rules for some
                local_args, local_kwargs = tree_map_only(DTensor, part_of, (args, kwargs))
                return func(*local_args, **local_kwargs)
            with implicit_replication():  # of tensors that lie whole on each rank
                leaves = [part.interleaved(leaf, first.shape) if _is_plain(leaf) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(leaves, spec)
                return tree_map_only(DTensor, lambda result: _as_part(result, first), func(*args, **kwargs))

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        with DisableTorchFunctionSubclass():
            copied = successor(self, self.detach().clone())
        return _become_part(copied, _part_of(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        with DisableTorchFunctionSubclass():
            return successor(self, self.detach()).__reduce_ex__(protocol)


def watch_parts(module: nn.Module, rendezvous: Rendezvous) -> None:
    """Let user code read and change the module's parameters of which this rank has a part."""
    parts = interleaved_parameters(module)
    for fqn, tensor, _ in named_state(module):
        if isinstance(tensor, DTensor):
            _become_part(tensor, _Part(fqn=fqn, parts=parts.get(fqn), rendezvous=rendezvous))


def own_part(full: Tensor, like: Tensor, parts: InterleavedShard | None) -> Tensor:
    """This rank's part of a full tensor, placed as another; of its own dtype and on its own device."""
    if like.is_meta:
        return torch.empty_like(full, device="meta")
    if not isinstance(like, DTensor):
        return full
    with DisableTorchFunctionSubclass():
        placed = torch.empty_like(like, dtype=full.dtype, requires_grad=False)
        fill(placed, full, parts)
        return placed.to(full.device)


def _become_part(tensor: Tensor, part: _Part) -> Tensor:
    tensor.__class__ = PartTensor
    vars(tensor).update({_PART: part, ORDER: part.parts})
    return tensor


def _part_of(tensor: Tensor) -> _Part:
    part: _Part = vars(tensor)[_PART]
    return part


def _for_steps(leaf: Any) -> Any:
    """The full value in place of a part of it, as steps compute with it; a part yet, if tensor parallel shards it."""
    value = unsharded(leaf)
    return _become_part(value, _part_of(leaf)) if value is not leaf and isinstance(value, DTensor) else value


def _as_part(result: DTensor, tensor: PartTensor) -> Tensor:
    """Let what comes of a part be one."""
    if (whole := whole_of(tensor)) is not None and is_read(tensor):
        mark_whole(result, whole)
    return _become_part(result, _part_of(tensor))


def _name(func: object) -> str:
    return getattr(func, "__name__", "")


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)


def _writes(func: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a function changes a part in place."""
    changed = args[:1] if is_in_place(_name(func)) or func == SET_DATA else kwargs.get("out")
    return any(isinstance(leaf, PartTensor) for leaf in tree_leaves(changed))


@lru_cache(_MAX_FUNCTIONS)
def _is_about(func: object) -> bool:
    """Whether a function asks for what a parameter says of itself without its values, or for its gradient."""
    if _name(func) in ("__get__", "__set__"):
        return func not in _VALUE_GETTERS and func not in _ALIASES and func != SET_DATA
    return func in _ABOUT


def _about(func: AnyCallable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Answer what is about a part, or gives the part itself."""
    with DisableTorchFunctionSubclass():
        tensor = args[0]
        if not isinstance(tensor, PartTensor) or (is_read(tensor) and func not in _ALIASES):
            return func(*args, **kwargs)
        if func == _SET_GRAD and _is_plain(args[1]):
            placed = own_part(args[1], tensor, order_of(tensor)).to(tensor.device)
            return func(tensor, _become_part(placed, _part_of(tensor)))
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
    if isinstance(values, PartTensor) and _alignment(values) == _alignment(tensor):
        tensor.copy_(values)
        return
    full = _part_of(values).full(values) if isinstance(values, PartTensor) else full_value(values)
    fill(tensor.detach(), full, order_of(tensor))


def _differentiated(func: AnyCallable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
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


# ---- computed on parts


def _stays(name: str, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether each rank can compute a function on its parts."""
    if not is_elementwise(name) or kwargs.get("out") is not None:
        return False
    return all(_are_aligned(leaves, name) for leaves in used_together(name, args, kwargs))


def _are_aligned(leaves: Sequence[object], name: str) -> bool:
    """Whether each rank has the same elements of all tensors, or can take them from a plain one."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    first = next((tensor for tensor in tensors if isinstance(tensor, PartTensor)), None)
    if first is None:
        return True
    if is_in_place(name) and tensors[0] is not first:
        return False
    for tensor in tensors:
        if isinstance(tensor, PartTensor):
            if _alignment(tensor) != _alignment(first):
                return False
        elif tensor.dim():
            if first.device_mesh.ndim > 1 or name.startswith("_foreach_") or tensor.dim() > first.dim():
                return False
            if any(size not in (1, full) for size, full in zip(tensor.shape[::-1], first.shape[::-1], strict=False)):
                return False
    return True


def _alignment(tensor: DTensor) -> object:
    return tensor.shape, tensor.device_mesh, tensor.placements, order_of(tensor)


# ---- computed on full values


@dataclass(frozen=True, kw_only=True, eq=False)
class _Gathered:
    """A part and its full value, which user code computes with."""

    tensor: DTensor
    full: Tensor

    @torch.no_grad()
    def write_back(self) -> None:
        """Take over what was changed."""
        fill(self.tensor.detach(), self.full.detach(), order_of(self.tensor))

    def views_in(self, result: object) -> object:
        """Let what shares memory with the full value write back."""
        storage = storage_id(self.full.untyped_storage())

        def shown(leaf: Tensor) -> Tensor:
            if type(leaf) is not Tensor or leaf.requires_grad or storage_id(leaf.untyped_storage()) != storage:
                return leaf
            view = leaf.as_subclass(GatheredView)
            vars(view)[_GATHERED] = self
            return view

        return self.tensor if result is self.full else tree_map_only(Tensor, shown, result)


class GatheredView(Tensor):
    """A view of a parameter's gathered value; what is changed in it goes back to the parts."""

    @classmethod
    def __torch_function__(cls, func: AnyCallable, types: Sequence[type], args: Any = (), kwargs: Any = None) -> object:
        if any(issubclass(given, AbsentTensor) for given in types):
            return NotImplemented
        with DisableTorchFunctionSubclass():
            return _written_back(func, args, kwargs or {}, _views_in(args, kwargs))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


def _on_full_values(func: AnyCallable, args: Args, kwargs: Kwargs) -> object:
    gathered: dict[int, _Gathered] = {}  # by argument

    def full(leaf: PartTensor) -> Tensor:
        if id(leaf) not in gathered:
            gathered[id(leaf)] = _Gathered(tensor=leaf, full=_part_of(leaf).full(leaf))
        return gathered[id(leaf)].full

    views = _views_in(args, kwargs)
    args, kwargs = tree_map_only(PartTensor, full, (args, kwargs))
    return _written_back(func, args, kwargs, [*gathered.values(), *views])


def _views_in(*arguments: object) -> list[_Gathered]:
    return [vars(leaf)[_GATHERED] for leaf in tree_leaves(arguments) if isinstance(leaf, GatheredView)]


def _written_back(func: AnyCallable, args: Args, kwargs: Kwargs, gathered: Sequence[_Gathered]) -> object:
    """Call a function, and take over what it changes of gathered values."""
    versions = [version_of(entry.full) for entry in gathered]
    result = func(*args, **kwargs)
    for entry, version in zip(gathered, versions, strict=True):
        if version_of(entry.full) != version:
            entry.write_back()
        result = entry.views_in(result)
    return result
