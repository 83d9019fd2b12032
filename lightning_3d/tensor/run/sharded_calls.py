"""Running a block's calls on shards: the mode that turns "replicated is plain" (see the note in `follow`) into fact.

Calls on plain tensors pass through. A call with a sharded tensor among its arguments runs

* locally, if it is a projection, attention, batched matmul or dropout (`reading`): exactly the collectives of the plan;
* locally, too, if DTensor would run it without communication (`local_form`);
* by DTensor otherwise, with its plain operands replicated;
* on gathered tensors, if DTensor has no rule for it.

What user code sees of a sharded tensor is a `ShardedActivation`, or a DTensor if its shards are uneven. Results that
are replicated or partially reduced become plain at once.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import PlanError
from lightning_3d.model.own_code import is_own
from lightning_3d.tensor.rules.attention import Attention, as_attention, attention_dim, mask_dim
from lightning_3d.tensor.rules.channelwise import as_channel_call
from lightning_3d.tensor.rules.dropout import Dropout, as_dropout
from lightning_3d.tensor.rules.function import (
    SET_DATA,
    Function,
    batched_matmul_dim,
    destination,
    function_name,
    is_batched_matmul,
    map_tensors,
    new_shape,
    runs_whole,
    simplified,
    takes_every_nth,
)
from lightning_3d.tensor.rules.gated import gated
from lightning_3d.tensor.rules.grouped import GroupedTensor, as_merge, as_repetition
from lightning_3d.tensor.rules.multihead import is_multi_head_attention, multi_head_attention
from lightning_3d.tensor.run import crossing
from lightning_3d.tensor.run.channel_calls import call_on_channels
from lightning_3d.tensor.run.crossing import local_shard, placement_of, shard_dim
from lightning_3d.tensor.run.grouped_calls import call_on_parts, reshaped, whole
from lightning_3d.tensor.run.local_form import LocalForm, Operand, call_locally, local_form, signature
from lightning_3d.tensor.run.partial_sums import PartialSum, keeps_partial
from lightning_3d.tensor.run.randomness import dropout_shard, seeded_for_rank
from lightning_3d.tensor.run.running_statistics import RunningStatistics
from lightning_3d.tensor.run.sharded_activation import ShardedActivation
from lightning_3d.tensor.run.weight_calls import WeightCalls
from lightning_3d.torch_internals.modes import DisableTorchFunction

_SHARDED = (DTensor, ShardedActivation, GroupedTensor, PartialSum)

# Calls that read what a handle itself knows; descriptors have `__get__`.
_READS = frozenset(
    {
        Tensor.shape.__get__,  # type: ignore[attr-defined]
        Tensor.dtype.__get__,  # type: ignore[attr-defined]
        Tensor.device.__get__,
        Tensor.ndim.__get__,  # type: ignore[attr-defined]
        Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
        Tensor.is_meta.__get__,  # type: ignore[attr-defined]
        Tensor.size,
        Tensor.dim,
        Tensor.numel,
        Tensor.is_floating_point,
        torch.is_floating_point,
        Tensor.is_complex,
        torch.is_complex,
        Tensor.__len__,
    }
)

_OF_AUTOGRAD = frozenset({"backward", "register_hook", "retain_grad", "__set__"})
"""Calls that change a tensor's place in the graph."""


class ShardedCalls(TorchFunctionMode):
    """Active during one forward of one block.

    Args:
        mesh: The tp axis.
        sequence: Full shape (B, T, D) of the block's input that is cut along its sequence; None if none is.
        defers_sums: Whether what row weights of experts give is reduced later (`partial_sums`).
    """

    def __init__(self, mesh: DeviceMesh, sequence: torch.Size | None = None, *, defers_sums: bool = False) -> None:
        super().__init__()
        self._mesh = mesh
        self._weights = WeightCalls(mesh, sequence, defers_sums=defers_sums)
        self.statistics = RunningStatistics(mesh)
        """To be entered with this mode."""

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == SET_DATA and (isinstance(args[0], nn.Parameter)):
            raise PlanError("parameter.data = ... inside of a block would change this forward's shard alone: use copy_")
        if not (_has_sharded(args) or (kwargs and _has_sharded(kwargs.values()))):
            return func(*args, **kwargs)
        if func in _READS:
            return func(*args, **kwargs)
        if is_multi_head_attention(func, args, kwargs):
            with self:
                return multi_head_attention(*args, **kwargs)
        if func is F.glu:
            with self:
                return gated(*args, **kwargs)
        args = simplified(func, args)
        if _has_sharded(args, PartialSum) or _has_sharded(kwargs.values(), PartialSum):
            if isinstance(destination(func, args, kwargs), PartialSum):
                raise PlanError(f"{function_name(func)} changes a sum in place that may not have been made yet")
            args, kwargs = map_tensors(_made, (args, kwargs))
            if keeps_partial(func, args, kwargs, _is_partial, _is_plain):
                return self._weights.on_parts_of_sum(func, args, kwargs)
            args, kwargs = map_tensors(_reduced, (args, kwargs))
            if not (_has_sharded(args) or _has_sharded(kwargs.values())):
                return func(*args, **kwargs)
        if (output := self._weights.answer(func, args, kwargs)) is not None:
            return output
        args, kwargs = map_tensors(_plain_if_replicated, (args, kwargs))
        if not (_has_sharded(args) or _has_sharded(kwargs.values())):
            return func(*args, **kwargs)
        if _has_sharded(args, GroupedTensor) or _has_sharded(kwargs.values(), GroupedTensor):
            return call_on_parts(func, args, kwargs, self._mesh, self._generic)
        if args and (dim := shard_dim(args[0], self._mesh)) is not None:
            merge = as_merge(func, args, kwargs, dim, num_ranks=self._mesh.size())
            if merge is not None:
                return reshaped(local_shard(args[0]), self._mesh, merge)
            repeated = as_repetition(func, args, kwargs, dim, num_ranks=self._mesh.size())
            if repeated is not None:
                return GroupedTensor(local_shard(args[0]).repeat(*args[1:]), self._mesh, repeated)
            if (shape := new_shape(func, args, kwargs, dim)) is not None:
                shape[dim] //= self._mesh.size()
                value = args[2:] if isinstance(args[1], list | tuple) else ()
                return crossing.as_sharded(func(local_shard(args[0]), shape, *value, **kwargs), self._mesh, dim)
            if takes_every_nth(func, args, kwargs, dim, size=self._mesh.size()):
                return crossing.as_sharded(func(local_shard(args[0]), args[1]), self._mesh, dim)
        if (channels := as_channel_call(func, args, kwargs, self._dim, self._mesh.size())) is not None:
            return call_on_channels(func, channels, self._mesh, self.statistics)
        if (attention := as_attention(func, args, kwargs)) is not None:
            return self._attend(attention)
        if (dropout := as_dropout(func, args, kwargs)) is not None and shard_dim(dropout.input, self._mesh) is not None:
            return self._drop(dropout)
        if is_batched_matmul(func, args, kwargs):
            dims = (shard_dim(args[0], self._mesh), shard_dim(args[1], self._mesh))
            dim = batched_matmul_dim(args[0], args[1], *dims)
            if dim is not None:
                return crossing.as_sharded(torch.matmul(local_shard(args[0]), local_shard(args[1])), self._mesh, dim)
        return self._generic(func, args, kwargs)

    def _dim(self, tensor: Tensor) -> int | None:
        return shard_dim(tensor, self._mesh)

    def _generic(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = destination(func, args, kwargs)
        if runs_whole(func) or (changed is not None and not isinstance(changed, _SHARDED)):
            if isinstance(changed, _SHARDED):
                raise PlanError(f"{function_name(func)} draws random numbers into a sharded tensor in place")
            return func(*map_tensors(whole, args), **map_tensors(whole, kwargs))
        form = self._local_form(func, args, kwargs)
        return (
            self._by_dtensor(func, args, kwargs, changed) if form is None else self._locally(form, func, args, kwargs)
        )

    def on_custom_function(
        self, cls: type[torch.autograd.Function], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a custom autograd function, whose own calls DTensor sees; this package's make and read shards."""
        if is_own(cls.__module__) or not (_has_sharded(args) or _has_sharded(kwargs.values())):
            return function(*args, **kwargs)
        with DisableTorchFunction():
            args, kwargs = map_tensors(_reduced, (args, kwargs))
            if _has_sharded(args, GroupedTensor) or _has_sharded(kwargs.values(), GroupedTensor):
                return function(*map_tensors(whole, args), **map_tensors(whole, kwargs))
            return self._by_dtensor(function, args, kwargs, None)

    def _by_dtensor(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Tensor | None) -> Any:
        name = function_name(func)
        if isinstance(changed, ShardedActivation) or (name in _OF_AUTOGRAD and isinstance(args[0], ShardedActivation)):
            raise PlanError(
                f"{name} changes a sharded tensor in place, and not every rank can do that on its own shard"
            )
        try:
            output = func(*map_tensors(self._operand, args), **map_tensors(self._operand, kwargs))
        except torch.OutOfMemoryError:
            raise
        except (NotImplementedError, RuntimeError) as error:
            # No sharded form. It depends on placements and shapes alone, so all ranks get here alike; a mistake of
            # the block itself is raised again below, in terms of full tensors.
            if changed is not None:
                raise PlanError(f"{name} changes a sharded tensor in place: {error}") from error
            return func(*map_tensors(whole, args), **map_tensors(whole, kwargs))
        return map_tensors(self._result, output)

    def _operand(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, ShardedActivation):
            return crossing.as_dtensor(tensor)
        return tensor if isinstance(tensor, DTensor) else crossing.replicate(tensor, self._mesh)

    def _result(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if placement_of(tensor).is_replicate() or placement_of(tensor).is_partial():
            return crossing.gather(tensor)
        dim = shard_dim(tensor, self._mesh)
        return tensor if dim is None else crossing.as_sharded(local_shard(tensor), self._mesh, dim)

    # ---------------------------------------------------------------------------------------------------- local calls

    def _local_form(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LocalForm | None:
        try:
            return local_form(
                func, signature(args, self._signature), signature(kwargs, self._signature), self._mesh.size()
            )
        except TypeError:  # an argument that can't be hashed
            return None

    def _signature(self, tensor: Tensor) -> Operand:
        return Operand(tensor.shape, tensor.dtype, tensor.device, shard_dim(tensor, self._mesh))

    def _locally(self, form: LocalForm, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        cuts, dims = iter(form.cuts), iter(form.dims)
        handles: dict[int, ShardedActivation] = {}

        def own(tensor: Tensor) -> Tensor:
            cut = next(cuts)
            if isinstance(tensor, ShardedActivation):
                local = tensor.own_shard()
                handles[id(local)] = tensor
                return local
            if isinstance(tensor, DTensor):
                return local_shard(tensor)
            return self._weights.column_input(tensor) if cut is None else self._slice(tensor, cut)

        def result(local: Tensor) -> Tensor:
            dim = next(dims)
            return handles[id(local)] if id(local) in handles else crossing.as_sharded(local, self._mesh, dim)

        output = call_locally(func, map_tensors(own, args), map_tensors(own, kwargs), form.local_shape)
        for handle in handles.values():
            handle.follow_local()
        return map_tensors(result, output)

    def _attend(self, call: Attention) -> Any:
        """Attention on local heads (or local batch), as torch has no rule for all of its kernels (2.13: CPU flash)."""
        operands = (call.query, call.key, call.value)
        dims = [shard_dim(tensor, self._mesh) for tensor in operands]
        is_clear = all(dim is not None or not isinstance(t, DTensor) for dim, t in zip(dims, operands, strict=True))
        dim = attention_dim(call, *dims, size=self._mesh.size()) if is_clear else None
        if dim is None:
            query, key, value = (whole(tensor) for tensor in operands)
            return self._attention(call, query, key, value, None if call.mask is None else whole(call.mask))
        query, key, value = (self._part(tensor, dim, call.query.shape[dim]) for tensor in operands)
        mask = call.mask
        if mask is not None:
            along = mask_dim(call, dim)
            if along is None:
                mask = self._weights.column_input(whole(mask))  # every rank has a part of its gradient
            else:
                mask = local_shard(mask) if shard_dim(mask, self._mesh) == along else self._slice(mask, along)
        with self._own_randomness(query.device) if call.dropout_p else nullcontext():
            output = self._attention(call, query, key, value, mask)
        return crossing.as_sharded(output, self._mesh, dim)

    def _part(self, tensor: Tensor, dim: int, num_heads: int) -> Tensor:
        """Take the own heads; of replicated keys and values those that the own query heads need."""
        if isinstance(tensor, _SHARDED):
            return local_shard(tensor)
        entered = self._weights.column_input(tensor)  # the gradients of heads that ranks share are summed
        per_head, num_own = num_heads // tensor.shape[dim], num_heads // self._mesh.size()
        first = self._mesh.get_local_rank() * num_own
        if num_own % per_head and per_head % num_own:  # the own query heads need unequal numbers of keys
            heads = torch.arange(first, first + num_own, device=tensor.device) // per_head
            return entered.index_select(dim, heads)
        return entered.narrow(dim, first // per_head, max(num_own // per_head, 1))

    def _slice(self, tensor: Tensor, dim: int) -> Tensor:
        return crossing.shard(whole(tensor), self._mesh, dim)

    @staticmethod
    def _attention(call: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=call.dropout_p,
            is_causal=call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )

    def _drop(self, call: Dropout) -> Tensor:
        if not call.training:
            return call.input
        dim = shard_dim(call.input, self._mesh)
        assert dim is not None
        kept = dropout_shard(local_shard(call.input), call.p, self._mesh.get_local_rank())
        return crossing.as_sharded(kept, self._mesh, dim)

    def _own_randomness(self, device: torch.device) -> AbstractContextManager[None]:
        return seeded_for_rank(device, self._mesh.get_local_rank())


def _has_sharded(values: Any, kinds: type[Tensor] | tuple[type[Tensor], ...] = _SHARDED) -> bool:
    """Whether arguments hold a sharded tensor, at most one list deep as torch functions take them."""
    for value in values:
        if isinstance(value, kinds):
            return True
        if isinstance(value, list | tuple) and any(isinstance(item, kinds) for item in value):
            return True
    return False


def _is_partial(tensor: Tensor) -> bool:
    return isinstance(tensor, PartialSum)


def _is_plain(tensor: Tensor) -> bool:
    return not isinstance(tensor, _SHARDED)


def _made(tensor: Tensor) -> Tensor:
    return tensor.made if isinstance(tensor, PartialSum) and tensor.made is not None else tensor


def _reduced(tensor: Tensor) -> Tensor:
    return tensor.reduced() if isinstance(tensor, PartialSum) else tensor


def _plain_if_replicated(tensor: Tensor) -> Tensor:
    """Parameters that reach a call past their module, as those of recurrent layers do."""
    if isinstance(tensor, DTensor) and placement_of(tensor).is_replicate():
        return local_shard(tensor)
    return tensor
