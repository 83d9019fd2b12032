"""The world that user code sees: the replicas of the model, in every layout.

Under DDP the ranks of torch's default process group are the replicas, and code counts on that: gathered negatives, sums
over all ranks, datasets that take every n-th sample. With a pipeline or tensor parallel several ranks hold one replica.
So while a Trainer runs, ``get_rank``, ``get_world_size`` and the collectives of the default group, as user code calls
them, are those of the dp axis. Calls by torch, Lightning and this package, and those with another group, stay.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as differentiable
from torch.overrides import handle_torch_function, has_torch_function

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import StepError
from lightning_3d.torch_internals.function_calls import calls_answered
from lightning_3d.torch_internals.process_groups import HIDDEN_COLLECTIVES
from lightning_3d.torch_internals.pytree import tree_leaves

_RANK_ARGUMENTS = {
    **dict.fromkeys(("broadcast", "broadcast_object_list", "scatter", "scatter_object_list"), "src"),
    **dict.fromkeys(("gather", "gather_object", "reduce", "send", "isend", "send_object_list"), "dst"),
    **dict.fromkeys(("recv", "irecv", "recv_object_list"), "src"),
    "__init__": "peer",  # of P2POp
}
"""Functions that take a rank -> the name of that argument."""

_WITHOUT_RANKS = (
    *("all_reduce", "all_reduce_coalesced", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("all_gather", "all_gather_coalesced", "all_gather_single", "all_gather_into_tensor", "all_gather_object"),
    *("all_to_all", "all_to_all_single"),
)

_BARRIERS = ("barrier", "monitored_barrier")

_BY_NAME = [vars(dist)[name] for name in (*_RANK_ARGUMENTS, *_WITHOUT_RANKS, *_BARRIERS) if name in vars(dist)]

_DIFFERENTIABLE = frozenset(
    getattr(differentiable, name)
    for name in (
        *("all_gather", "all_reduce", "all_to_all", "all_to_all_single"),
        *("broadcast", "gather", "reduce", "reduce_scatter", "scatter"),
    )
)

COLLECTIVES: frozenset[Callable[..., object]] = frozenset(
    {*_BY_NAME, *HIDDEN_COLLECTIVES, *_DIFFERENTIABLE, dist.P2POp.__init__}
)
"""The functions that communicate."""

_MAKING_GROUPS: tuple[Callable[..., object], ...] = (
    *(dist.new_group, dist.new_subgroups, dist.new_subgroups_by_enumeration, dist.split_group),
    init_device_mesh,
)

_WORLD: Callable[..., object] = vars(type(dist.group))["WORLD"].fget
"""Gives the default group."""

COLLECTIVE, CHANGING_COLLECTIVE = "collective", "collective_"
"""The names of functions of the user's that communicate, as modes of torch functions see them; the latter change
tensors that they are given, the first one among them."""

_USERS = ("torch.distributed.nn.", "torch.nn.modules.", "torch.utils.data.")
_OTHERS = ("torch", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_3d")


@cache  # a collective of torch's asks several times
def is_users(module: str) -> bool:
    """Whether code of a module runs for the user's, and not for the strategy or for torch itself."""
    return module.startswith(_USERS) or module.partition(".")[0] not in _OTHERS


def is_of_all(group: object, replicas: dist.ProcessGroup) -> bool:
    """Whether a group that user code gives is that of all replicas: none, the default one, or what it has as that."""
    return group in (None, dist.group.WORLD, replicas)


@contextmanager
def replica_world(mesh: Mesh) -> Iterator[None]:
    """Let user code find the replicas in place of all ranks."""
    over = _Replicas(mesh.group("samples"))
    with (
        calls_answered((dist.get_rank, dist.get_world_size), over.ask),
        calls_answered((_WORLD,), over.world),
        calls_answered(COLLECTIVES, over.call),
        calls_answered(_MAKING_GROUPS, _refuse),
    ):
        yield


class _Replicas:
    """Answers calls over all ranks.

    Args:
        group: Along the dp axis.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._runs: dict[Callable[..., object], Callable[..., object]] = {}

    def ask(
        self, caller: str, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """``get_rank`` or ``get_world_size``."""
        if is_users(caller) and self._is_over_all(original, args, kwargs):
            return original(self._group)
        return original(*args, **kwargs)

    def world(
        self, caller: str, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """``dist.group.WORLD``."""
        return self._group if is_users(caller) else original(*args, **kwargs)

    def call(
        self, caller: str, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        """A collective. What is not there as a whole, as an output of a block on shards, is made whole for it."""
        stays = original.__name__ in _BARRIERS  # of all ranks: more than one of the replicas, and as good
        if stays or not is_users(caller) or not self._is_over_all(original, args, kwargs):
            return original(*args, **kwargs)
        if original.__module__ != differentiable.__name__:  # which call the others, here and in their backwards
            args, kwargs = (), self._over_replicas(original, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not tensors or not has_torch_function(tensors):
            return original(*args, **kwargs)
        run = self._runs.setdefault(original, _named(original))
        return handle_torch_function(run, tensors, tensors[0], args, kwargs)

    def _is_over_all(
        self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> bool:
        return is_of_all(_signature(function).bind(*args, **kwargs).arguments.get("group"), self._group)

    def _over_replicas(
        self, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> dict[str, object]:
        """The same arguments, with ranks and group those of the dp axis."""
        given = dict(_signature(original).bind(*args, **kwargs).arguments, group=self._group)
        name = _RANK_ARGUMENTS.get(original.__name__)
        if name is not None and (rank := given.pop(name, None)) is not None:
            given[f"group_{name}"] = rank
        elif name == "dst":  # of rank 0, unless it is told
            given.setdefault("group_dst", 0)
        return given


def _refuse(
    caller: str, original: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    if is_users(caller):
        raise StepError(
            f"{original.__name__} was called by {caller}, but in a pipeline or with tensor parallel the ranks that it"
            " counts are replicas, of which no further groups are made. Leave the group out: torch.distributed is over"
            " all replicas by itself, and so is torch.distributed.group.WORLD."
        )
    return original(*args, **kwargs)


def _named(original: Callable[..., object]) -> Callable[..., object]:
    """A function for modes of torch functions: always the same, as they keep what they find out about it."""

    def run(first: Tensor, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        return original(*args, **kwargs)

    run.__name__ = COLLECTIVE if original.__module__ == differentiable.__name__ else CHANGING_COLLECTIVE
    return run


@cache
def _signature(function: Callable[..., object]) -> inspect.Signature:
    return inspect.signature(function)
