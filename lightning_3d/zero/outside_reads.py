"""Stage 3: code that reads a parameter where its unit is not gathered.

FSDP2 gathers a unit's parameters when the unit is called. Code that reaches them in another way (another method of the
block, its children called one by one, another block that reads its weights, a penalty over ``self.parameters()``) would
meet shards. So each sharded parameter is of the class `ShardedParameter`: what a step computes with it is computed with
its full value, gathered there and then, a leaf whose gradient is reduced once the backward has ended.

    FSDP2's unit      forward: gather | run | free       backward: gather | run | reduce | free
    read outside      read: gather | run                 gradients of all reads, then: reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_3d.errors import StepError
from lightning_3d.torch_internals.autograd import is_in_backward
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pytree import tree_flatten, tree_leaves, tree_unflatten
from lightning_3d.zero.attributes import OWN_PREFIX, users_attributes
from lightning_3d.zero.buckets import bucket_bytes, make_buckets
from lightning_3d.zero.replicas import Replicas
from lightning_3d.zero.shard import RankShard, plain

_ABOUT = {  # what a parameter says of itself without its values
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.stride, Tensor.__hash__, Tensor.__repr__),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.requires_grad_, Tensor.register_hook, Tensor.__deepcopy__),
    *(Tensor.nelement, Tensor.ndimension, Tensor.element_size, Tensor.is_contiguous, Tensor.get_device),
    *(Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage_offset, Tensor.register_post_accumulate_grad_hook),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
}
_VALUE_GETTERS = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # a getset descriptor
ALIASES = {Tensor.detach, torch.detach, DATA}
"""Functions that give the same values under another name."""
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_MAX_FUNCTIONS = 4096
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor"))}


class ShardedParameter(DTensor):
    """A parameter, or its ``detach()``, of which each replica has its rows; steps compute with all of it."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if len(types) == 1 and is_about(func):  # of its first argument; optimizers and FSDP2 ask that all the time
            reads = _whole_of(args[0]).reads
            if reads.between_steps is not None and not reads.is_on:
                return reads.between_steps(func, types, args, kwargs)
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        if len(types) > 1 and any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in leaves):
            return NotImplemented  # what lies on another pipeline stage answers for itself
        reads = next(_whole_of(leaf).reads for leaf in leaves if isinstance(leaf, ShardedParameter))
        if not reads.is_on and reads.between_steps is not None:
            return reads.between_steps(func, types, args, kwargs)
        if func == SET_DATA:
            return _set_data(*args)
        if reads.is_on and not is_about(func):
            if func in ALIASES:
                with DisableTorchFunctionSubclass():
                    return _watched(func(*args, **kwargs), _whole_of(args[0]))
            if not _writes(func, args, kwargs):
                leaves = [reads.full(leaf) if isinstance(leaf, ShardedParameter) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(leaves, spec)
                return func(*args, **kwargs)
            leaves = _placed(leaves, getattr(func, "__name__", str(func)))
            args, kwargs = tree_unflatten(leaves, spec)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def gathered(self) -> DTensor:
        """The values that steps compute with, where tensor parallel shards it, too."""
        full = _whole_of(self).reads.full(self)
        assert isinstance(full, DTensor)
        return full

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with DisableTorchFunctionSubclass():
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
        vars(copied).update(users_attributes(self))
        _whole_of(self).reads.copied(copied, self)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        with DisableTorchFunctionSubclass():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


@torch.no_grad()
def _set_data(tensor: ShardedParameter, values: Tensor) -> None:
    """Take values over: DTensors keep theirs in another tensor, which ``data`` does not reach."""
    if values.shape != tensor.shape or values.dtype != tensor.dtype:
        raise StepError(
            f"{_whole_of(tensor).fqn}.data was set to a tensor of shape {tuple(values.shape)} and {values.dtype}, but"
            f" at ZeRO stage 3 each replica has its rows of {tuple(tensor.shape)} in {tensor.dtype}. Give it one of"
            " that shape and dtype."
        )
    target, own = _placed([tensor, values], "data")
    with DisableTorchFunctionSubclass():
        target.copy_(own)


@lru_cache(_MAX_FUNCTIONS)
def is_about(func: Any) -> bool:
    """Whether a function asks for what a parameter says of itself without its values, or for its gradient."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return func not in _VALUE_GETTERS and func not in ALIASES and func != SET_DATA
    return func in _ABOUT


def is_in_place(func: Any) -> bool:
    """Whether a function changes its first argument."""
    name = getattr(func, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


def _writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes a sharded parameter in place."""
    if is_in_place(func):
        return any(isinstance(leaf, ShardedParameter) for leaf in tree_leaves(args[:1]))
    return any(isinstance(leaf, ShardedParameter) for leaf in tree_leaves(kwargs.get("out")))


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """A parameter as it was before it was sharded."""

    fqn: str
    shard: RankShard
    """This rank's rows; ``shard.parameter`` has the whole's shape and no memory."""
    tensor_mesh: DeviceMesh | None
    """The tp axis, if tensor parallel shards it, too."""
    tensor_placements: tuple[Placement, ...]
    reads: OutsideReads

    def __deepcopy__(self, memo: dict[int, Any]) -> _Whole:
        return self


_WHOLE = f"{OWN_PREFIX}whole"


def _whole_of(tensor: ShardedParameter) -> _Whole:
    whole: _Whole = vars(tensor)[_WHOLE]
    return whole


def _watched(tensor: DTensor, whole: _Whole) -> DTensor:
    tensor.__class__ = ShardedParameter
    vars(tensor)[_WHOLE] = whole
    return tensor


def _placed(leaves: Sequence[Any], name: str) -> list[Any]:
    """The arguments of a function that changes sharded parameters: tensors like these as their rows on this rank."""
    targets = [leaf for leaf in leaves if isinstance(leaf, ShardedParameter)]
    placed: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or isinstance(leaf, DTensor) or leaf.numel() == 1:
            placed.append(leaf)
            continue
        alike = [target for target in targets if target.shape == leaf.shape]
        if not alike or _whole_of(alike[0]).tensor_mesh is not None:
            raise StepError(
                f"{name} changes {_whole_of(targets[0]).fqn} in place with a tensor of shape {tuple(leaf.shape)}, but"
                f" at ZeRO stage 3 each replica has its rows of the {tuple(targets[0].shape)} only. Give it a tensor of"
                " the parameter's shape, or change it in `with trainer.strategy.summon_full_params():`, outside of a"
                " step."
            )
        whole = _whole_of(alike[0])
        placed.append(RankShard(parameter=nn.Parameter(alike[0].detach())).like_parameter(whole.shard.own(leaf)))
    return placed


def answered_by(
    parameter: ShardedParameter, between_steps: Callable[..., Any], copied: Callable[[Tensor, Tensor], object]
) -> None:
    """Let these answer functions of the parameter, and of those with it, where no step runs, and see its copies."""
    reads = _whole_of(parameter).reads
    reads.between_steps, reads.copied = between_steps, copied


@contextmanager
def gathered_as(parameter: ShardedParameter, gathered: Callable[[Tensor], object]) -> Iterator[None]:
    """Have ``gathered`` called inside with the full value of a parameter, before anything computes with it."""
    reads = _whole_of(parameter).reads
    reads.seen_by[parameter] = gathered
    try:
        yield
    finally:
        del reads.seen_by[parameter]


class OutsideReads:
    """Gathers parameters where they are read, and reduces their gradients.

    Args:
        dtype: Of gradients that are reduced; their own if None.
        device: Where steps run, whatever parameters lie on.
    """

    def __init__(self, replicas: Replicas, dtype: torch.dtype | None, device: torch.device) -> None:
        self._replicas, self._dtype, self._device = replicas, dtype, device
        self._num_steps = 0  # that run now
        self._cached: dict[ShardedParameter, nn.Parameter] = {}  # gathered in this run of the step
        self.between_steps: Callable[..., Any] | None = None
        """Answers functions of parameters where no step runs; called as ``__torch_function__``."""
        self.copied: Callable[[Tensor, Tensor], object] = lambda copy, original: None
        """Called with a copy of a parameter, a DTensor, and the parameter."""
        self.keeps = False
        """Whether to gather once for several runs, until `forget`."""
        self.gathered = nn.Module()
        """Its parameters are those gathered now: schedules that split the backward look for weights in modules."""
        self.seen_by: dict[ShardedParameter, Callable[[Tensor], object]] = {}
        """Called with full values."""
        self._read: dict[ShardedParameter, None] = {}  # whose gradients are expected, alike on all replicas
        self._gradients: dict[ShardedParameter, Tensor] = {}

    @property
    def is_on(self) -> bool:
        """Whether a step, or the backward that recomputes a part of it, reads parameters."""
        return self._num_steps > 0 or is_in_backward()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run a step inside."""
        self._num_steps += 1
        try:
            yield
        finally:
            self._num_steps -= 1
            if not self.keeps:
                self.forget()

    def wholes(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, _Whole]:
        """Describe parameters before they are sharded, given with their FQNs."""
        return {fqn: self._describe(fqn, parameter) for fqn, parameter in parameters}

    def _describe(self, fqn: str, parameter: nn.Parameter) -> _Whole:
        held = plain(parameter.detach())
        like = nn.Parameter(held.new_empty((), device=self._device).expand(held.shape), held.is_floating_point())
        tensor: Any = parameter if isinstance(parameter, DTensor) else None
        return _Whole(
            fqn=fqn,
            shard=RankShard(parameter=like, size=self._replicas.num_shards, rank=self._replicas.shard_rank),
            tensor_mesh=None if tensor is None else tensor.device_mesh,
            tensor_placements=() if tensor is None else tuple(tensor.placements),
            reads=self,
        )

    def watch(self, parameters: Iterable[tuple[str, nn.Parameter]], wholes: Mapping[str, _Whole]) -> None:
        """Let code of steps read these parameters, which are sharded now."""
        for fqn, parameter in parameters:
            assert isinstance(parameter, DTensor)
            _watched(parameter, wholes[fqn])

    def read_arguments(self, unit: nn.Module, args: Any, kwargs: Any) -> Any:
        """A hook before the forward of a unit, and before FSDP2's: parameters among its arguments are read."""
        leaves, spec = tree_flatten((args, kwargs))
        if not any(isinstance(leaf, ShardedParameter) for leaf in leaves):
            return None
        return tree_unflatten(
            [self.full(leaf) if isinstance(leaf, ShardedParameter) else leaf for leaf in leaves], spec
        )

    def full(self, parameter: ShardedParameter) -> Tensor:
        """The full value; every replica calls it."""
        is_trained = torch.is_grad_enabled() and parameter.requires_grad
        if is_trained and parameter in self._cached:
            return self._cached[parameter]
        full = self.value(parameter)
        leaf = nn.Parameter(full) if is_trained else full
        if (gathered := self.seen_by.get(parameter)) is not None:
            gathered(leaf)
        if not isinstance(leaf, nn.Parameter):
            return leaf
        leaf.register_post_accumulate_grad_hook(partial(self._accumulated, parameter))
        self._read[parameter] = None
        if self._num_steps:
            self._cached[parameter] = leaf
            self.gathered.register_parameter(str(len(self._cached)), leaf)
        return leaf

    @torch.no_grad()
    def value(self, parameter: ShardedParameter) -> Tensor:
        """The full value, without gradients; every replica calls it."""
        with DisableTorchFunctionSubclass():
            return self._gather(_whole_of(parameter), parameter.to_local())

    def _gather(self, whole: _Whole, own: Tensor) -> Tensor:
        shard, shape = whole.shard, whole.shard.parameter.shape
        row = own.new_zeros(shard.elements_per_rank, device=self._device)
        row[: own.numel()] = own.reshape(-1)
        rows = self._replicas.all_gather(row.new_empty(shard.size, row.numel()), row)()
        full = rows.view(shard.size * shard.rows_per_rank, -1)[: shard.num_rows].reshape(shape)
        if whole.tensor_mesh is None:
            return full
        return DTensor.from_local(full, whole.tensor_mesh, whole.tensor_placements, run_check=False)

    def _accumulated(self, parameter: ShardedParameter, full: Tensor) -> None:
        assert full.grad is not None
        with torch.no_grad():
            before = self._gradients.get(parameter)
            self._gradients[parameter] = full.grad if before is None else before.add_(full.grad)
        full.grad = None

    def forget(self) -> None:
        """Gather anew from now on, as parameters may change."""
        for parameter, leaf in self._cached.items():
            if leaf.grad is not None:  # without its hook, from a backward that was split
                self._accumulated(parameter, leaf)
        self._cached = {}
        parameters_of(self.gathered).clear()

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients of all that was read; every replica calls it."""
        self.forget()
        parameters = {_whole_of(p).shard.parameter: p for p in (*self._read, *self._gradients)}
        shards = [_whole_of(parameter).shard for parameter in parameters.values()]
        size = bucket_bytes(shards)
        buckets = make_buckets(shards, self._replicas, num_bytes=size, dtype=self._dtype, compression=lambda _: None)
        for bucket in buckets:
            for index, stand_in in enumerate(bucket.parameters):
                gradient = self._gradients.pop(parameters[stand_in], None)
                if gradient is not None:
                    bucket.fill(index, plain(gradient))
            bucket.launch()
        for bucket in buckets:
            for shard, own in bucket.collect():
                parameter = parameters[shard.parameter]
                assert isinstance(parameter, nn.Parameter)
                gradient = RankShard(parameter=parameter).like_parameter(
                    own.to(parameter.device, parameter.dtype, copy=True)
                )
                with DisableTorchFunctionSubclass():
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._read = {}
