"""Parameters and buffers of other pipeline stages, of which this rank has the shape and no values.

They are on the meta device, and torch runs many functions of a real tensor and one on meta without an error:
``a.add_(b)`` leaves ``a`` as it was, and a matrix product returns whatever lay in memory. So each is an `AbsentTensor`,
and so is all that is computed from it; a function that would need its values raises. Asked for their device, parameters
and buffers name that of the rank's own ones, as in one process: code makes tensors there, and moves its batch there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON
from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.fake_tensors import FakeTensor
from lightning_3d.torch_internals.modules import named_state
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import storage_id
from lightning_3d.zero.attributes import OWN_PREFIX, users_attributes
from lightning_3d.zero.shard import plain

_READERS = {"item", "tolist", "numpy", "__array__", "__bool__", "__float__", "__int__", "__index__", "__complex__"}
"""Functions that make Python's or numpy's values of a tensor's."""

_DRAWING = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"),
    *("bernoulli", "normal", "rand_like", "randint_like", "randn_like"),
}
"""Functions that draw random numbers."""

_ACCESSORS = {"__get__", "__set__", "__delete__"}
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]  # a getset descriptor
_GET_DEVICE = Tensor.device.__get__
_FQN, _MODEL, _PLACE = (f"{OWN_PREFIX}{name}" for name in ("fqn", "model", "place"))
_ON_STAGE = "lies on another pipeline stage"


class AbsentTensor(Tensor):
    """A tensor that this rank has no values of."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func == _SET_DATA:
            _check("data", args, writes=True)
            return None  # the stage that holds it takes the values
        if func == _GET_DEVICE and vars(args[0])[_PLACE] == _ON_STAGE:
            return _device_of(vars(args[0])[_MODEL]())
        if name == "to" and isinstance(args[0], AbsentTensor):
            args, kwargs = tree_map_only((str, torch.device), lambda _: torch.device("meta"), (args, kwargs))
        if name not in _ACCESSORS:
            writes = _writes(name, kwargs)
            for leaves in _used_together(name, args, kwargs):
                _check(name, leaves, writes=writes)
        try:
            with DisableTorchFunctionSubclass():
                if name in _DRAWING or getattr(func, "__module__", "") == nn.init.__name__:
                    _draw(func, args, kwargs)
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
                    _become_absent_as(leaf, origin)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = self._plain()
        _become_absent_as(copied, self)
        return copied

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if vars(self)[_PLACE] != _ON_STAGE:
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


def mark_absent(module: nn.Module) -> None:
    """Let what the module has on the meta device raise where its values are needed."""
    model = weakref.ref(module)
    for fqn, tensor, _ in named_state(module):
        if tensor.is_meta:
            _become_absent(tensor, fqn, model)


def stand_in(value: Tensor, name: str, module: nn.Module, place: str) -> Tensor:
    """A tensor of the same shape, without values.

    Args:
        place: Where the values are, for the message: "is saved by rank 0".
    """
    tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
    _become_absent(tensor, name, weakref.ref(module), place)
    return tensor


def _become_absent(tensor: Tensor, fqn: str, model: weakref.ref[nn.Module], place: str = _ON_STAGE) -> None:
    if not isinstance(tensor, AbsentTensor):
        tensor.__class__ = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor
        vars(tensor).update({_FQN: fqn, _MODEL: model, _PLACE: place})


def _become_absent_as(tensor: Tensor, origin: AbsentTensor) -> None:
    _become_absent(tensor, vars(origin)[_FQN], vars(origin)[_MODEL], vars(origin)[_PLACE])


def _first_absent(*arguments: Any) -> AbsentTensor:
    return next(leaf for leaf in tree_leaves(arguments) if isinstance(leaf, AbsentTensor))


def _device_of(model: nn.Module | None) -> torch.device:
    """Where the stages keep the model."""
    present = (tensor.device for _, tensor, _ in named_state(model) if not tensor.is_meta) if model is not None else ()
    return next(iter(present), torch.device("cpu"))


def _draw(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Draw the random numbers that the stage with the values draws, so that those that follow are the same."""
    device = _device_of(vars(_first_absent(args, kwargs))[_MODEL]())

    def stand_in(tensor: AbsentTensor) -> Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)

    args, kwargs = tree_map_only(AbsentTensor, stand_in, (args, kwargs))
    func(*args, **kwargs)


def _needs_values(name: str, absent: AbsentTensor) -> StepError:
    return StepError(
        f"{name} needs the values of {vars(absent)[_FQN]}, or of what was computed from it, but it"
        f" {vars(absent)[_PLACE]}, and this rank has its shape alone. Do it on every rank {SUMMON}."
    )


def _writes(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a function changes its first argument in place."""
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE or name == "__setitem__"
    return is_in_place and kwargs.get("out") is None


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
    present = [tensor for tensor in tensors if not (tensor.is_meta or isinstance(tensor, FakeTensor))]
    if not absent:
        return
    if name in _READERS:
        raise _needs_values(name, absent[0])
    if writes and tensors[0] is absent[0]:
        if any(_is_parameter(tensor, vars(absent[0])[_MODEL]()) for tensor in present):
            raise StepError(
                f"{name} changes {vars(absent[0])[_FQN]} by a parameter of another pipeline stage than its own, so that"
                f" no rank has the values of both. Do it on every rank {SUMMON}."
            )
    elif any(tensor.dim() or (writes and tensor is tensors[0]) for tensor in present):
        raise _needs_values(name, absent[0])


def _is_parameter(tensor: Tensor, model: nn.Module | None) -> bool:
    """Whether a tensor is one of the model's, or shares its memory."""
    if model is None:
        return False
    held = (plain(present.detach()) for _, present, _ in named_state(model) if not present.is_meta)
    return storage_id(plain(tensor.detach()).untyped_storage()) in {storage_id(t.untyped_storage()) for t in held}
