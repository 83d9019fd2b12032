"""Parameters and buffers of other pipeline stages, of which this rank has the shape and no values.

They are on the meta device, and torch runs many functions of a real tensor and one on meta without an error:
``a.add_(b)`` leaves ``a`` as it was, and a matrix product returns whatever lay in memory. So each is an `AbsentTensor`,
and so is all that is computed from it. With a and b absent, p a parameter of this stage, x any other tensor here:

    about it                            its shape, hooks, ...        answered
                                        its device                   that of the rank's own parameters, as in one
                                                                     process: code makes tensors there
    a stage has all that is combined    a * b, a.mul_(2), a.add_(x)  it computes the result, which is absent here;
                                                                     random numbers are drawn here, too
    no stage has all of it              p.copy_(a), a.copy_(p),      stages send each other the values if all of them
                                        p * a, stack([|a|, |p|])     run the present code; else an error
    Python's and numpy's values         float(a), a.numpy()          an error

A change in place takes it that every stage has ``x``, as a mask or a learning rate; other functions, that only this
stage has it, as a norm of ``p``, unless it is a number among larger tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, SupportsIndex

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON, AnyCallable
from lightning_3d.torch_internals.dispatch import (
    GET_DEVICE,
    SET_DATA,
    DisableTorchFunctionSubclass,
    OpOverload,
    TorchDispatchMode,
    draws_random_numbers,
    is_in_place,
    used_together,
    written_arguments,
)
from lightning_3d.torch_internals.dtensor import part_of
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import storage_of
from lightning_3d.zero.attributes import OWN_PREFIX, successor

READERS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
"""Functions that make Python's or numpy's values of a tensor's."""

_DRAWN_BY_VALUES = ("multinomial", "binomial", "poisson", "_standard_gamma", "_sample_dirichlet")
"""Operators that draw as many random numbers as values want."""

_ACCESSORS = {"__get__", "__set__", "__delete__"}
_FOR_OTHERS = {"new_empty", "new_full", "new_ones", "new_tensor", "new_zeros"}
"""Functions that make a tensor for which they take the type and the device of their first argument alone."""

_BY_OTHERS = {"expand_as", "reshape_as", "to", "type_as", "view_as"}
"""Functions that take the type, the device or the shape of the tensors that follow their first argument."""

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


class _Model:
    """A model of which this rank has some tensors. Neither is kept alive.

    Args:
        state: Its parameters and buffers by FQN.
    """

    def __init__(self, module: nn.Module, state: Sequence[tuple[str, Tensor]] = ()) -> None:
        self._module = weakref.ref(module)
        with DisableTorchFunctionSubclass():
            known = [(storage_of(part_of(held)), (fqn, weakref.ref(held))) for fqn, held in reversed(state)]
            self._here = [(fqn, weakref.ref(held)) for fqn, held in state if not held.is_meta]
        self._names = dict(known)  # by memory, of several names the first

    @property
    def device(self) -> torch.device:
        """Where its tensors on this rank are."""
        with DisableTorchFunctionSubclass():
            state = () if (module := self._module()) is None else named_state(module)
            return next((tensor.device for _, tensor, _ in state if not tensor.is_meta), torch.device("cpu"))

    def fqn_of(self, tensor: Tensor, *, is_full: bool = False) -> str | None:
        """Which of its parameters and buffers a tensor is, or shares the memory of.

        Args:
            is_full: Whether to tell that of tensors of the same shape only.
        """
        with DisableTorchFunctionSubclass():
            memory = storage_of(part_of(tensor))
            known = [self._names[memory]] if memory in self._names else []
            others = () if tensor.is_meta else self._here  # their ``data`` may have been set since
            for fqn, reference in chain(known, others):
                held = reference()
                if held is not None and storage_of(part_of(held)) == memory:
                    return fqn if not is_full or held.shape == tensor.shape else None
            return None


@dataclass(frozen=True, kw_only=True)
class _Lack:
    """A tensor that a rank has no values of, or the one that it was computed from."""

    fqn: str
    model: _Model
    place: str
    stages: Stages | None


class AbsentTensor(Tensor):
    """A tensor that this rank has no values of."""

    @classmethod
    def __torch_function__(cls, func: AnyCallable, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func == SET_DATA:
            _check("data", args, writes=True)
            return None  # the stage that holds it takes the values
        if func == GET_DEVICE:
            return _lack(args[0]).model.device
        if name == "__get__":  # optimizers ask each parameter in each step whether it has a gradient
            with DisableTorchFunctionSubclass():
                found = func(*args)
            if not isinstance(found, Tensor):
                return found
        if _reads_kind_alone(name, args):
            return func(*tree_map_only(AbsentTensor, _of_its_kind, args), **kwargs)
        if name == "to" and isinstance(args[0], AbsentTensor):
            args, kwargs = tree_map_only((str, torch.device), lambda _: torch.device("meta"), (args, kwargs))
        if name.startswith("_foreach_") and (places := _places_here(name, args, kwargs)):
            return _by_place(func, args, kwargs, places)
        if name not in _ACCESSORS:
            args, kwargs = _with_values_of_stages(name, args, kwargs)
            for leaves in used_together(name, args, kwargs):
                _check(name, leaves, writes=_writes(name, kwargs))
        origin = next((leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentTensor)), None)
        if origin is None:
            return func(*args, **kwargs)  # with values that came
        args, kwargs = tree_map_only(DTensor, _without_values, (args, kwargs))  # a part goes with no plain tensor
        try:
            with DisableTorchFunctionSubclass(), AdvanceRngOnMeta(_lack(origin).model.device):
                result = func(*args, **kwargs)
        except RuntimeError as error:
            if not isinstance(error, NotImplementedError) and "meta" not in str(error):
                raise
            raise _needs_values(name, origin) from error  # as of ``cpu()``, or with tensors that lie here
        if isinstance(result, Tensor | list | tuple):
            for leaf in tree_leaves(result):
                if type(leaf) is Tensor and leaf.is_meta:
                    _become_absent(leaf, _lack(origin))
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        with DisableTorchFunctionSubclass():
            copied = successor(self, self.detach().clone())
        return _become_absent(copied, _lack(self))

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if _lack(self).place != _ON_STAGE:
            raise _needs_values("pickling", self)  # a file of a checkpoint's entries would lack them
        with DisableTorchFunctionSubclass():
            return successor(self, self.detach()).__reduce_ex__(protocol)


class AbsentParameter(AbsentTensor, nn.Parameter):
    """A parameter that this rank has no values of."""


class AdvanceRngOnMeta(TorchDispatchMode):
    """Draws the random numbers of tensors on meta for others of their shapes, so that those that follow are the same
    as where the values are.

    Args:
        device: Where they are.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch 2.13
        self._device = device

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
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
    state = [(fqn, tensor) for fqn, tensor, _ in named_state(module)]
    model = _Model(module, state)
    for fqn, tensor in state:
        if tensor.is_meta:
            _become_absent(tensor, _Lack(fqn=fqn, model=model, place=_ON_STAGE, stages=stages))


def stand_in(value: Tensor, name: str, module: nn.Module, place: str) -> Tensor:
    """A tensor of the same shape, without values.

    Args:
        place: Where the values are, for the message: "is saved by rank 0".
    """
    tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
    return _become_absent(tensor, _Lack(fqn=name, model=_Model(module), place=place, stages=None))


def _become_absent(tensor: Tensor, lack: _Lack) -> Tensor:
    if not isinstance(tensor, AbsentTensor):
        tensor.__class__ = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor
        vars(tensor)[_LACK] = lack
    return tensor


def _lack(tensor: AbsentTensor) -> _Lack:
    lack: _Lack = vars(tensor)[_LACK]
    return lack


def _needs_values(name: str, absent: AbsentTensor) -> StepError:
    return StepError(
        f"{name} needs the values of {_lack(absent).fqn}, or of what was computed from it, but it"
        f" {_lack(absent).place}, and this rank has its shape alone. Do it on every rank {SUMMON}, and give it the copy"
        " where one is read, such as an average. Or change one parameter by another itself, as"
        " target.data.mul_(0.9).add_(source.data, alpha=0.1): stages send each other such values."
    )


def _reads_kind_alone(name: str, args: Sequence[object]) -> bool:
    """Whether a function needs the type, the device and the shape of absent tensors alone."""
    return bool(args) and name in (_FOR_OTHERS if isinstance(args[0], AbsentTensor) else _BY_OTHERS)


def _of_its_kind(absent: AbsentTensor) -> Tensor:
    """A tensor as this one, with one element for all of its shape."""
    with DisableTorchFunctionSubclass():
        return torch.empty((), dtype=absent.dtype, device=_lack(absent).model.device).expand(absent.shape)


def _writes(name: str, kwargs: Mapping[str, object]) -> bool:
    """Whether a function changes its first argument in place."""
    return is_in_place(name) and kwargs.get("out") is None


def _without_values(part: DTensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, device="meta")


def _places_here(name: str, args: Args, kwargs: Kwargs) -> list[bool]:
    """For each place of the lists that a function takes, whether nothing at it is absent; empty if something always is.

    Parts that tensor parallel leaves this rank compute as such at a place of their own only.
    """
    groups = used_together(name, args, kwargs)
    places = [not any(isinstance(leaf, AbsentTensor) for leaf in group) for group in groups]
    return places if any(places) else []


def _by_place(func: AnyCallable, args: Args, kwargs: Kwargs, places: Sequence[bool]) -> list[object]:
    """Call a function of lists for the places where all is here, and for the others."""
    results: list[object] = [None] * len(places)
    for is_here in (True, False):
        chosen = [i for i, here in enumerate(places) if here == is_here]

        def at_these(value: object, chosen: Sequence[int] = chosen) -> object:
            return [value[i] for i in chosen] if isinstance(value, list | tuple) else value

        given = {name: at_these(value) for name, value in kwargs.items()}
        for i, result in zip(chosen, func(*map(at_these, args), **given), strict=True):
            results[i] = result
    return results


def _is_here(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def _check(name: str, leaves: Iterable[object], *, writes: bool) -> None:
    """Raise for a function that needs values of absent tensors.

    One that changes an absent tensor may have any others: the stage that holds the tensor changes it. But where these
    are parameters that lie here, that stage has none of them.
    """
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    absent = next((tensor for tensor in tensors if isinstance(tensor, AbsentTensor)), None)
    if absent is None:
        return
    here, lack = list(filter(_is_here, tensors)), _lack(absent)
    if writes and absent is tensors[0]:
        others = [fqn for tensor in here if (fqn := lack.model.fqn_of(tensor))]
        if any(lack.stages is None or _are_disjoint(lack.stages, lack.fqn, fqn) for fqn in others):
            raise StepError(
                f"{name} changes {lack.fqn} by a parameter of another pipeline stage than its own, so that no rank has"
                f" the values of both. Do it on every rank {SUMMON}, or, in a step, set pipeline.mode=inline."
            )
    elif name in READERS or any(tensor.dim() or (writes and tensor is tensors[0]) for tensor in here):
        raise _needs_values(name, absent)


def _with_values_of_stages(name: str, args: Args, kwargs: Kwargs) -> Any:
    """The arguments of a function, with the values of those that no stage has all of."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    lack = next(_lack(leaf) for leaf in leaves if isinstance(leaf, AbsentTensor))
    if len(leaves) < 2 or lack.stages is None or not lack.stages.are_met or kwargs.get("out") is not None:
        return args, kwargs
    writes = _writes(name, kwargs)
    sent: dict[int, Tensor] = {}
    read: set[int] = set()  # of them those that this rank computes with
    for group in used_together(name, args, kwargs):
        tensors = [leaf for leaf in group if isinstance(leaf, Tensor)]
        apart = _of_another_stage(tensors, lack.model, lack.stages) if writes else _all_if_apart(tensors, lack.stages)
        sent |= {id(tensor): tensor for tensor in apart}
        if not (writes and isinstance(tensors[0], AbsentTensor)):
            read |= {id(tensor) for tensor in apart}
    if not sent:
        return args, kwargs
    values = dict(zip(sent, lack.stages.values(list(sent.values()), name), strict=True))
    values |= {key: torch.empty_like(values[key], device="meta") for key in sent.keys() - read}
    return tree_map_only(Tensor, lambda tensor: values.get(id(tensor), tensor), (args, kwargs))


def _of_another_stage(tensors: Sequence[Tensor], model: _Model, stages: Stages) -> list[Tensor]:
    """Parameters of the model by which another one, the first of the tensors, is changed on stages without them."""
    fqn = model.fqn_of(tensors[0]) if len(tensors) > 1 else None
    if fqn is None:
        return []
    others = [(tensor, model.fqn_of(tensor, is_full=True)) for tensor in tensors[1:]]
    return [tensor for tensor, other in others if other and _are_disjoint(stages, fqn, other)]


def _are_disjoint(stages: Stages, fqn: str, other: str) -> bool:
    """Whether no stage has both parameters."""
    return stages.holders(fqn).isdisjoint(stages.holders(other))


def _all_if_apart(tensors: Sequence[Tensor], stages: Stages) -> Sequence[Tensor]:
    """All of the tensors, if no stage has all of them; none in a step, or with a graph, as gradients would be lost."""
    holders = [stages.holders(_lack(tensor).fqn) for tensor in tensors if isinstance(tensor, AbsentTensor)]
    with DisableTorchFunctionSubclass():
        is_followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if is_followed or not holders or not stages.are_between_steps:
            return ()
        are_numbers = all(tensor.dim() == 0 for tensor in tensors)
        has_some_here = any((tensor.dim() or are_numbers) and _is_here(tensor) for tensor in tensors)
    return tensors if has_some_here or not frozenset.intersection(*holders) else ()
