"""Running a block's calls on shards: the mode that turns "replicated is plain" (see the note in `follow`) into fact.

Calls on plain tensors pass through. A call with a DTensor among its arguments runs

* locally, if it is a projection, attention, a batched matmul or dropout (`calls`): no DTensor dispatch, and exactly the
  collectives of the plan;
* by DTensor otherwise, with its plain operands replicated;
* on gathered tensors, if DTensor has no rule for it.

Results that are replicated or partially reduced become plain at once, so a DTensor in user code is always sharded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import PlanError
from lightning_3d.tensor import crossing
from lightning_3d.tensor.calls import (
    Attention,
    Dropout,
    Function,
    Projection,
    as_attention,
    as_dropout,
    as_projection,
    attention_dim,
    batched_matmul_dim,
    destination,
    function_name,
    is_batched_matmul,
    is_random,
    map_tensors,
    mask_dim,
)
from lightning_3d.tensor.crossing import placement_of, shard_dim
from lightning_3d.tensor.randomness import dropout_shard, seeded_for_rank


class ShardedCalls(TorchFunctionMode):
    """Active during one forward of one block.

    Args:
        mesh: The tp axis.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self._mesh = mesh
        # Plain activations that column weights read: id -> (activation, its version, what they read).
        self._column_inputs: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not (_has_dtensor(args) or (kwargs and _has_dtensor(kwargs.values()))):
            return func(*args, **kwargs)
        projection = as_projection(func, args, kwargs)
        if projection is not None and shard_dim(projection.weight, self._mesh) is not None:
            return self._project(projection)
        args, kwargs = map_tensors(_plain_if_replicated, (args, kwargs))
        if not (_has_dtensor(args) or _has_dtensor(kwargs.values())):
            return func(*args, **kwargs)
        if (attention := as_attention(func, args, kwargs)) is not None:
            return self._attend(attention)
        if (dropout := as_dropout(func, args, kwargs)) is not None and shard_dim(dropout.input, self._mesh) is not None:
            return self._drop(dropout)
        if is_batched_matmul(func, args, kwargs):
            dims = (shard_dim(args[0], self._mesh), shard_dim(args[1], self._mesh))
            dim = batched_matmul_dim(args[0], args[1], *dims)
            if dim is not None:
                return crossing.as_sharded(torch.matmul(_local(args[0]), _local(args[1])), self._mesh, dim)
        return self._generic(func, args, kwargs)

    def _generic(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        changed = destination(func, args, kwargs)
        if not is_random(func) and (changed is None or isinstance(changed, DTensor)):
            try:
                output = func(*map_tensors(self._operand, args), **map_tensors(self._operand, kwargs))
            except torch.OutOfMemoryError:
                raise
            except (NotImplementedError, RuntimeError) as error:
                # No sharded form. It depends on placements and shapes alone, so all ranks get here alike; a mistake of
                # the block itself is raised again below, in terms of full tensors.
                if isinstance(changed, DTensor):
                    raise PlanError(f"{function_name(func)} changes a sharded tensor in place: {error}") from error
            else:
                return map_tensors(_plain_unless_sharded, output)
        elif isinstance(changed, DTensor):
            raise PlanError(f"{function_name(func)} draws random numbers into a sharded tensor in place")
        return func(*map_tensors(_whole, args), **map_tensors(_whole, kwargs))

    def _operand(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, DTensor) else crossing.replicate(tensor, self._mesh)

    # ---------------------------------------------------------------------------------------------------- local calls

    def _project(self, call: Projection) -> Tensor:
        """``input @ weight + bias`` with a sharded weight: column gives a sharded result, row a plain one."""
        weight, bias = call.weight, call.bias
        assert isinstance(weight, DTensor)
        matrix = crossing.local_shard(weight) if call.features_dim == 0 else crossing.local_shard(weight).t()
        if shard_dim(weight, self._mesh) == call.features_dim:
            part = None if bias is None else self._column_bias(bias)
            output = F.linear(self._column_input(_whole(call.input)), matrix, part)
            return crossing.as_sharded(output, self._mesh, output.dim() - 1)
        output = crossing.reduce_rows(F.linear(self._row_input(call.input), matrix), self._mesh)
        return output if bias is None else output + _whole(bias)

    def _column_input(self, tensor: Tensor) -> Tensor:
        """The same for all column weights that read `tensor`, so that their gradients are summed before one reduce."""
        known = self._column_inputs.get(id(tensor))
        if known is not None and known[1] == tensor._version:
            return known[2]
        entered = crossing.enter_columns(tensor, self._mesh)
        self._column_inputs[id(tensor)] = (tensor, tensor._version, entered)
        return entered

    def _column_bias(self, bias: Tensor) -> Tensor:
        if shard_dim(bias, self._mesh) == bias.dim() - 1:
            return _local(bias)
        return crossing.shard(_whole(bias), self._mesh, bias.dim() - 1)

    def _row_input(self, tensor: Tensor) -> Tensor:
        last = tensor.dim() - 1
        if shard_dim(tensor, self._mesh) == last:
            return _local(tensor)
        return crossing.shard(_whole(tensor), self._mesh, last)

    def _attend(self, call: Attention) -> Any:
        """Attention on local heads (or local batch), as torch has no rule for all of its kernels (2.13: CPU flash)."""
        operands = (call.query, call.key, call.value)
        dims = [shard_dim(tensor, self._mesh) for tensor in operands]
        is_clear = all(dim is not None or not isinstance(t, DTensor) for dim, t in zip(dims, operands, strict=True))
        dim = attention_dim(call, *dims, size=self._mesh.size()) if is_clear else None
        if dim is None:
            query, key, value = (_whole(tensor) for tensor in operands)
            return self._attention(call, query, key, value, None if call.mask is None else _whole(call.mask))
        query, key, value = (self._part(tensor, dim, call.query.shape[dim]) for tensor in operands)
        mask = call.mask
        if mask is not None:
            along = mask_dim(call, dim)
            if along is None:
                mask = _whole(mask)
            else:
                mask = _local(mask) if shard_dim(mask, self._mesh) == along else self._slice(mask, along)
        with self._own_randomness(query.device) if call.dropout_p else nullcontext():
            output = self._attention(call, query, key, value, mask)
        return crossing.as_sharded(output, self._mesh, dim)

    def _part(self, tensor: Tensor, dim: int, num_heads: int) -> Tensor:
        """Take the own heads; replicated keys and values are repeated for their query heads first."""
        if isinstance(tensor, DTensor):
            return _local(tensor)
        return self._slice(tensor.repeat_interleave(num_heads // tensor.shape[dim], dim), dim)

    def _slice(self, tensor: Tensor, dim: int) -> Tensor:
        return crossing.shard(_whole(tensor), self._mesh, dim)

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
        kept = dropout_shard(_local(call.input), call.p, self._mesh.get_local_rank())
        return crossing.as_sharded(kept, self._mesh, dim)

    def _own_randomness(self, device: torch.device) -> AbstractContextManager[None]:
        return seeded_for_rank(device, self._mesh.get_local_rank())


def _has_dtensor(values: Any) -> bool:
    """Whether arguments hold a DTensor, at most one list deep as torch functions take them."""
    for value in values:
        if isinstance(value, DTensor):
            return True
        if isinstance(value, list | tuple) and any(isinstance(item, DTensor) for item in value):
            return True
    return False


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return crossing.local_shard(tensor)


def _whole(tensor: Tensor) -> Tensor:
    return crossing.gather(tensor) if isinstance(tensor, DTensor) else tensor


def _plain_if_replicated(tensor: Tensor) -> Tensor:
    """Parameters that reach a call past their module, as those of recurrent layers do."""
    if isinstance(tensor, DTensor) and placement_of(tensor).is_replicate():
        return crossing.local_shard(tensor)
    return tensor


def _plain_unless_sharded(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor) and (placement_of(tensor).is_replicate() or placement_of(tensor).is_partial()):
        return crossing.gather(tensor)
    return tensor
