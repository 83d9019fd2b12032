"""Stage 3: code that reads a parameter where its unit is not gathered.

FSDP2 gathers a unit's parameters when the unit is called. Code that reaches them in another way (another method of the
block, its children called one by one, another block that reads its weights, a penalty over ``self.parameters()``) would
meet shards. So each sharded parameter is marked: what a step computes with it is computed with its full value
(`unsharded`), gathered there and then, a leaf whose gradient is reduced once the backward has ended.

    FSDP2's unit      forward: gather | run | free       backward: gather | run | reduce | free
    read outside      read: gather | run                 gradients of all reads, then: reduce
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from lightning_3d.torch_internals.autograd import is_in_backward
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_flatten, tree_unflatten
from lightning_3d.zero.attributes import OWN_PREFIX
from lightning_3d.zero.buckets import make_buckets
from lightning_3d.zero.dp_comm import DPComm
from lightning_3d.zero.shard import RankShard, plain

_WHOLE = f"{OWN_PREFIX}whole"


@dataclass(frozen=True, kw_only=True)
class ShardedParam:
    """A parameter as it was before it was sharded."""

    shard: RankShard
    """This rank's rows; ``shard.parameter`` has the whole's shape and no memory."""
    tensor_mesh: DeviceMesh | None
    """The tp axis, if tensor parallel shards it, too."""
    tensor_placements: tuple[Placement, ...]
    reads: OutsideReads


def mark_whole(tensor: DTensor, whole: ShardedParam) -> None:
    """Let steps compute with the full value of a parameter, or of its ``detach()``."""
    vars(tensor)[_WHOLE] = whole


def whole_of(leaf: object) -> ShardedParam | None:
    """The description of a parameter of which each replica has its rows, and steps compute with all of it."""
    return vars(leaf).get(_WHOLE) if isinstance(leaf, DTensor) else None


def is_read(leaf: object) -> bool:
    """Whether a step runs, which computes with the full value of such a parameter."""
    whole = whole_of(leaf)
    return whole is not None and whole.reads.is_on


def unsharded(leaf: Any) -> Any:
    """The full value in place of such a parameter, as steps compute with it; every replica calls it."""
    whole = whole_of(leaf)
    return leaf if whole is None else whole.reads.full(leaf)


def _on_full_values(
    cls: type[torch.autograd.Function], call: Callable[..., object], args: Args, kwargs: Kwargs
) -> object:
    """Apply a custom autograd function, such as a reentrant checkpoint; its arguments are not told of it."""
    is_of_shards = cls.__module__.startswith(("lightning_3d.", "torch.distributed."))
    return call(*(args if is_of_shards else map(unsharded, args)), **kwargs)


def _whole_of(parameter: DTensor) -> ShardedParam:
    whole: ShardedParam = vars(parameter)[_WHOLE]
    return whole


class OutsideReads:
    """Gathers parameters where they are read, and reduces their gradients.

    Args:
        dtype: Of gradients that are reduced; their own if None.
        device: Where steps run, whatever parameters lie on.
    """

    def __init__(self, replicas: DPComm, dtype: torch.dtype | None, device: torch.device) -> None:
        self._replicas, self._dtype, self._device = replicas, dtype, device
        self._num_steps = 0  # that run now
        self._cached: dict[DTensor, nn.Parameter] = {}  # gathered in this run of the step
        self.keeps = False
        """Whether to gather once for several runs, until `forget`."""
        self.gathered = nn.Module()
        """Its parameters are those gathered now: schedules that split the backward look for weights in modules."""
        self._read: dict[DTensor, None] = {}  # whose gradients are expected, alike on all replicas
        self._gradients: dict[DTensor, Tensor] = {}

    @property
    def is_on(self) -> bool:
        """Whether a step, or the backward that recomputes a part of it, reads parameters."""
        return self._num_steps > 0 or is_in_backward()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Run a step inside."""
        self._num_steps += 1
        try:
            with custom_functions_seen(_on_full_values):
                yield
        finally:
            self._num_steps -= 1
            if not self.keeps:
                self.forget()

    def describe(self, parameter: nn.Parameter) -> ShardedParam:
        """Describe a parameter before it is sharded."""
        held = plain(parameter.detach())
        like = nn.Parameter(held.new_empty((), device=self._device).expand(held.shape), held.is_floating_point())
        tensor: Any = parameter if isinstance(parameter, DTensor) else None
        return ShardedParam(
            shard=RankShard(parameter=like, size=self._replicas.num_shards, rank=self._replicas.shard_rank),
            tensor_mesh=None if tensor is None else tensor.device_mesh,
            tensor_placements=() if tensor is None else tuple(tensor.placements),
            reads=self,
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as FSDP2's own hooks in what a user compiled
    def read_arguments(self, unit: nn.Module, args: object, kwargs: object) -> Any:
        """A hook before the forward of a unit, and before FSDP2's: parameters among its arguments are read."""
        leaves, spec = tree_flatten((args, kwargs))
        if not any(map(whole_of, leaves)):
            return None
        return tree_unflatten(list(map(unsharded, leaves)), spec)

    def full(self, parameter: DTensor) -> Tensor:
        """The full value; every replica calls it."""
        is_trained = torch.is_grad_enabled() and parameter.requires_grad
        if is_trained and parameter in self._cached:
            return self._cached[parameter]
        full = self.value(parameter)
        if not is_trained:
            return full
        leaf = nn.Parameter(full)
        leaf.register_post_accumulate_grad_hook(partial(self._accumulated, parameter))
        self._read[parameter] = None
        if self._num_steps:
            self._cached[parameter] = leaf
            self.gathered.register_parameter(str(len(self._cached)), leaf)
        return leaf

    @torch.no_grad()
    def value(self, parameter: DTensor) -> Tensor:
        """The full value, without gradients; every replica calls it."""
        whole = _whole_of(parameter)
        shard, shape = whole.shard, whole.shard.parameter.shape
        with DisableTorchFunctionSubclass():
            own = parameter.to_local()
            row = own.new_zeros(shard.elements_per_rank, device=self._device)
            row[: own.numel()] = own.reshape(-1)
            rows = self._replicas.all_gather(row.new_empty(shard.size, row.numel()), row)()
            full = rows.view(shard.size * shard.rows_per_rank, -1)[: shard.num_rows].reshape(shape)
            if whole.tensor_mesh is None:
                return full
            return DTensor.from_local(full, whole.tensor_mesh, whole.tensor_placements, run_check=False)

    def _accumulated(self, parameter: DTensor, full: Tensor) -> None:
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

    def drop(self) -> None:
        """Forget all that was read, and its gradients."""
        self.forget()
        self._read, self._gradients = {}, {}

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduce the gradients of all that was read; every replica calls it."""
        self.forget()
        parameters = {_whole_of(p).shard.parameter: p for p in (*self._read, *self._gradients)}
        shards = [_whole_of(parameter).shard for parameter in parameters.values()]
        buckets = make_buckets(shards, self._replicas, dtype=self._dtype)
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
