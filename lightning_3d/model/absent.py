"""Parameters and buffers of other pipeline stages, of which this rank has the shape and no values.

They are on the meta device, and torch runs many functions of a real tensor and one on meta without an error:
``a.add_(b)`` leaves ``a`` as it was, and a matrix product returns whatever lay in memory. So each is an `AbsentTensor`,
and so is all that is computed from it; a function that would need its values raises. But where no stage has all
that a function takes, each knows that, and they send each other the values: ``target.copy_(values)`` of two parameters,
``m * target.data + (1 - m) * values.data``, ``torch.stack`` of norms.

Asked for their device, parameters and buffers name that of the rank's own ones, as in one process: code makes tensors
there, and moves its batch there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON
from lightning_3d.torch_internals.dispatch import (
    GET_DEVICE,
    SET_DATA,
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    draws_random_numbers,
    is_in_place,
    written_arguments,
)
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import storage_id
from lightning_3d.zero.attributes import OWN_PREFIX, users_attributes
from lightning_3d.zero.shard import plain

READERS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
"""Functions that make Python's or numpy's values of a tensor's."""

_DRAWN_BY_VALUES = ("multinomial", "binomial", "poisson", "_standard_gamma", "_sample_dirichlet")
"""Operators that draw as many random numbers as values want."""

_ACCESSORS = {"__get__", "__set__", "__delete__"}
_LACK = f"{OWN_PREFIX}lack"
_ON_STAGE = "lies on another pipeline stage"


class Stages(Protocol):
    """The pipeline stages of a model, which send each other values."""

    @property
    def are_met(self) -> bool:
        """Whether the present code runs on all stages alike."""

    @property
    def are_between_steps(self) -> bool:
        """Whether a stage that calls `values` alone raises."""

    def holders(self, fqn: str) -> frozenset[int]:
        """Indices on the pp axis of the ranks that have a parameter or buffer."""

    def values(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The full values on every rank of tensors that some stages lack, the others as they are; all ranks call it.

        Args:
            what: What they are used for, the same on all ranks.
        """


@dataclass(frozen=True, kw_only=True)
class _Lack:
    """A tensor that a rank has no values of, or the one that it was computed from."""

    fqn: str
    model: weakref.ref[nn.Module]
    place: str
    stages: Stages | None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lack:
        return self


class AbsentTensor(Tensor):
    """A tensor that this rank has no values of."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func == SET_DATA:
            _check("data", args, writes=True)
            return None  # the stage that holds it takes the values
        if func == GET_DEVICE and _lack(args[0]).place == _ON_STAGE:
            return _device_of(_lack(args[0]).model())
        if name == "to" and isinstance(args[0], AbsentTensor):
            args, kwargs = tree_map_only((str, torch.device), lambda _: torch.device("meta"), (args, kwargs))
        if name not in _ACCESSORS:
            args, kwargs = _with_values_of_stages(name, args, kwargs)
            for leaves in _used_together(name, args, kwargs):
                _check(name, leaves, writes=_writes(name, kwargs))
        if not any(isinstance(leaf, AbsentTensor) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)  # with values that came
        try:
            with DisableTorchFunctionSubclass(), StandInDraws(_device_of(_lack(_first_absent(args, kwargs)).model())):
                result = func(*args, **kwargs)
        except NotImplementedError as error:  # as of ``cpu()`` or ``torch.equal``
            raise _needs_values(name, _first_absent(args, kwargs)) from error
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise _needs_values(name, _first_absent(args, kwargs)) from error  # with tensors that lie here
        if isinstance(result, Tensor | list | tuple):
            origin = _first_absent(args, kwargs)
            for leaf in tree_leaves(result):
                if type(leaf) is Tensor and leaf.is_meta:
                    _become_absent(leaf, _lack(origin))
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self._plain()
        _become_absent(copied, _lack(self))
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if _lack(self).place != _ON_STAGE:
            raise _needs_values("pickling", self)  # a file of a checkpoint's entries would lack them
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> Tensor:
        """The same of torch's class."""
        with DisableTorchFunctionSubclass():
            same = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
            if isinstance(self, nn.Parameter):
                same = nn.Parameter(same, requires_grad=self.requires_grad)
        vars(same).update(users_attributes(self))
        return same


class AbsentParameter(AbsentTensor, nn.Parameter):
    """A parameter that this rank has no values of."""


class StandInDraws(TorchDispatchMode):
    """Draws the random numbers of tensors on meta for others of their shapes, so that those that follow are the same
    as where the values are.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_values = not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs)))
        if has_values or not draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        if func.overloadpacket.__name__ in _DRAWN_BY_VALUES:
            raise NotImplementedError(f"{func} on meta")
        drawn_args, drawn_kwargs = tree_map_only(Tensor, self._stand_in, (args, kwargs))
        if kwargs.get("device") is not None:
            drawn_kwargs["device"] = self._device
        drawn = func(*drawn_args, **drawn_kwargs)
        if written := written_arguments(func, args, kwargs):
            return written[0]
        return tree_map_only(Tensor, lambda tensor: tensor.to("meta"), drawn)

    def _stand_in(self, tensor: Tensor) -> Tensor:
        memory = torch.zeros(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=self._device)
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def mark_absent(module: nn.Module, stages: Stages | None = None) -> None:
    """Let what the module has on the meta device raise where its values are needed.

    Args:
        stages: Send values for changes of the module's parameters by others of them.
    """
    model = weakref.ref(module)
    for fqn, tensor, _ in named_state(module):
        if tensor.is_meta:
            _become_absent(tensor, _Lack(fqn=fqn, model=model, place=_ON_STAGE, stages=stages))


def stand_in(value: Tensor, name: str, module: nn.Module, place: str) -> Tensor:
    """A tensor of the same shape, without values.

    Args:
        place: Where the values are, for the message: "is saved by rank 0".
    """
    tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
    _become_absent(tensor, _Lack(fqn=name, model=weakref.ref(module), place=place, stages=None))
    return tensor


def _become_absent(tensor: Tensor, lack: _Lack) -> None:
    if not isinstance(tensor, AbsentTensor):
        tensor.__class__ = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor
        vars(tensor)[_LACK] = lack


def _lack(tensor: AbsentTensor) -> _Lack:
    lack: _Lack = vars(tensor)[_LACK]
    return lack


def _first_absent(*arguments: Any) -> AbsentTensor:
    return next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, AbsentTensor))


def _device_of(model: nn.Module | None) -> torch.device:
    """Where the stages keep the model."""
    present = (tensor.device for _, tensor, _ in named_state(model) if not tensor.is_meta) if model is not None else ()
    return next(iter(present), torch.device("cpu"))


def _needs_values(name: str, absent: AbsentTensor) -> StepError:
    return StepError(
        f"{name} needs the values of {_lack(absent).fqn}, or of what was computed from it, but it"
        f" {_lack(absent).place}, and this rank has its shape alone. Do it on every rank {SUMMON}."
    )


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument in place."""
    return is_in_place(name) and kwargs.get("out") is None


def _used_together(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[list[Any]]:
    """The tensors that a function combines: all of its arguments, or those at one place of its lists."""
    given = [*([kwargs["out"]] if kwargs.get("out") is not None else []), *args, *kwargs.values()]
    lists = [value for value in given if isinstance(value, list | tuple)]
    if not name.startswith("_foreach_") or not lists:
        yield tree_leaves(given)
        return
    for i in range(len(lists[0])):
        yield [value[i] if isinstance(value, list | tuple) and i < len(value) else value for value in given]


def _check(name: str, leaves: Iterable[Any], *, writes: bool) -> None:
    """Raise for a function that needs values of absent tensors.

    One that changes an absent tensor may have any others: the stage that holds the tensor changes it. But where these
    are parameters that lie here, that stage has none of them.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    absent = [tensor for tensor in tensors if isinstance(tensor, AbsentTensor)]
    present = list(filter(_is_present, tensors))
    if not absent:
        return
    if name in READERS:
        raise _needs_values(name, absent[0])
    if writes and tensors[0] is absent[0]:
        if any(_fqn_of(tensor, _lack(absent[0]).model()) for tensor in present):
            raise StepError(
                f"{name} changes {_lack(absent[0]).fqn} by a parameter of another pipeline stage than its own, so that"
                f" no rank has the values of both. Do it on every rank {SUMMON}, or, in a step, set"
                " pipeline.mode=inline."
            )
    elif any(tensor.dim() or (writes and tensor is tensors[0]) for tensor in present):
        raise _needs_values(name, absent[0])


def _with_values_of_stages(name: str, args: Any, kwargs: Any) -> Any:
    """The arguments of a function that several stages have between them, with the values that some of them lack."""
    lack = _lack(_first_absent(args, kwargs))
    num_tensors = sum(isinstance(leaf, Tensor) for leaf in tree_leaves((args, kwargs)))
    if num_tensors < 2 or lack.stages is None or not lack.stages.are_met or kwargs.get("out") is not None:
        return args, kwargs
    needed: dict[int, Tensor] = {}
    used: set[int] = set()  # of them those that this rank computes with
    for leaves in _used_together(name, args, kwargs):
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if _writes(name, kwargs):
            others = {id(tensor): tensor for tensor in tensors[1:] if _is_elsewhere(tensor, tensors[0], lack)}
            used |= set() if isinstance(tensors[0], AbsentTensor) else others.keys()
            needed |= others
        elif lack.stages.are_between_steps and _are_apart(tensors, lack.stages):
            needed |= {id(tensor): tensor for tensor in tensors}
            used |= needed.keys()
    if needed:
        needed = dict(zip(needed, lack.stages.values(list(needed.values()), name), strict=True))
    needed |= {key: torch.empty_like(value, device="meta") for key, value in needed.items() if key not in used}
    return tree_map_only(Tensor, lambda tensor: needed.get(id(tensor), tensor), (args, kwargs))


def _are_apart(tensors: Sequence[Tensor], stages: Stages) -> bool:
    """Whether no stage has all of these, so that each of them knows that; with a graph, gradients would be lost."""
    holders = [stages.holders(_lack(tensor).fqn) for tensor in tensors if isinstance(tensor, AbsentTensor)]
    with DisableTorchFunctionSubclass():
        if not holders or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return False
        is_scalar = all(tensor.dim() == 0 for tensor in tensors)  # else a number that all ranks have
        has_present = any((tensor.dim() or is_scalar) and _is_present(tensor) for tensor in tensors)
    return has_present or any(other.isdisjoint(holders[0]) for other in holders)


def _is_elsewhere(tensor: Tensor, changed: Tensor, lack: _Lack) -> bool:
    """Whether a parameter is to be changed by another one, and no rank has both."""
    stages, absent = lack.stages, [t for t in (tensor, changed) if isinstance(t, AbsentTensor)]
    assert stages is not None
    if len(absent) == 2 and stages.holders(_lack(absent[0]).fqn) == stages.holders(_lack(absent[1]).fqn):
        return False
    own, other = _fqn_of(changed, lack.model()), _fqn_of(tensor, lack.model(), is_full=True)
    return own is not None and other is not None and stages.holders(own).isdisjoint(stages.holders(other))


def _is_present(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _fqn_of(tensor: Tensor, model: nn.Module | None, *, is_full: bool = False) -> str | None:
    """Which of the model's parameters and buffers a tensor is, or shares the memory of.

    Args:
        is_full: Whether to tell that of tensors of the same shape only.
    """
    own = _storage_of(tensor)
    for fqn, held, _ in named_state(model) if model is not None else ():
        if held.is_meta == tensor.is_meta and _storage_of(held) == own:
            return None if is_full and held.shape != tensor.shape else fqn
    return None


def _storage_of(tensor: Tensor) -> int:
    with DisableTorchFunctionSubclass():
        return storage_id(plain(tensor.detach()).untyped_storage())
