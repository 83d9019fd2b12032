"""Building a model whose large parameters rank 0 alone has, until it sends each rank its own in setup.

Rank 0 builds it as it is, in host memory. On every other rank a parameter loses its values when a module registers it,
and becomes an `UnbuiltTensor`; so does all that is computed from such tensors, or written with them: initialisations
run on shapes. The random numbers that they draw are drawn on stand-ins, one at a time, so that what is drawn
afterwards is the same on all ranks. Code that needs values in Python raises.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import swap_tensors

from lightning_3d.errors import PlanError
from lightning_3d.model.absent import READERS, AdvanceRngOnMeta
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.torch_internals.dispatch import (
    GET_DEVICE,
    GET_IS_META,
    SET_DATA,
    DisableTorchFunctionSubclass,
    is_in_place,
)
from lightning_3d.torch_internals.modules import TRUNC_NORMAL
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import Args, tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import count_as_parameter
from lightning_3d.zero.attributes import OWN_PREFIX, users_attributes

_SMALL = 2**14
"""Bytes up to which every rank builds a parameter."""
_HOST = torch.device("cpu")
_NAME = f"{OWN_PREFIX}unbuilt"


class UnbuiltTensor(Tensor):
    """A tensor that rank 0 alone has the values of, while a model is built; it says that it lies on the host, too."""

    @classmethod
    def __torch_function__(cls, func: AnyCallable, types: object, args: Args = (), kwargs: Any = None) -> object:
        if func == GET_DEVICE:
            return _HOST
        if func == GET_IS_META:
            return False
        name, kwargs = getattr(func, "__name__", str(func)), dict(kwargs or {})
        origin = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, UnbuiltTensor))
        if name in READERS:
            raise _needs_values(name, origin)
        if name in ("cpu", "cuda"):
            return origin
        if name == "__iter__":
            return iter(origin.unbind(0))
        if "device" in kwargs:
            kwargs["device"] = "meta"
        if name == "to":
            args = tree_map_only((str, torch.device), lambda _: torch.device("meta"), args)
        try:
            for tensor in tree_leaves(_written(func, name, args, kwargs)):
                _lose_values(tensor, _name_of(origin))
            args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
            with DisableTorchFunctionSubclass(), AdvanceRngOnMeta(_HOST):
                result = func(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            if "meta" not in str(error) and "swap" not in str(error):  # of what is written there are views
                raise
            raise _needs_values(name, origin) from error
        for leaf in tree_leaves(result) if isinstance(result, Tensor | list | tuple) else ():
            if type(leaf) is Tensor and leaf.is_meta:
                _become_unbuilt(leaf, _name_of(origin))
        return result

    def __deepcopy__(self, memo: dict[int, object]) -> UnbuiltTensor:
        return _unbuilt(self, _name_of(self))

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise _needs_values("pickling", self)


@contextmanager
def building(*, is_first: bool) -> Iterator[None]:
    """Build modules inside, in host memory.

    Args:
        is_first: Whether this is rank 0, which has all values.
    """
    truncate = getattr(nn.init, TRUNC_NORMAL)

    def lose(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        if type(parameter) is nn.Parameter and parameter.nbytes > _SMALL and not parameter.is_meta:
            with suppress(RuntimeError):  # something holds a weak reference to it, or a view: it stays as it is
                _lose_values(parameter, f"{type(module).__name__}.{name}")

    def trunc_normal_(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        if isinstance(tensor, UnbuiltTensor):  # it draws until all are within bounds
            truncate(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **kwargs)
            return tensor
        return truncate(tensor, *args, **kwargs)  # type: ignore[no-any-return]

    with torch.device(_HOST), ExitStack() as patches:
        if not is_first:
            patches.callback(register_module_parameter_registration_hook(lose).remove)
            patches.enter_context(replaced("truncated normals", nn.init, {TRUNC_NORMAL: trunc_normal_}))
        yield


def is_unbuilt(module: nn.Module) -> bool:
    """Whether this rank lacks values of a module that rank 0 built."""
    return any(isinstance(tensor, UnbuiltTensor) for tensor in chain(module.parameters(), module.buffers()))


def _unbuilt(like: Tensor, name: str) -> UnbuiltTensor:
    """A tensor like another one, without values."""
    with DisableTorchFunctionSubclass():
        made = torch.empty_like(like, device="meta").requires_grad_(like.requires_grad)
    vars(made).update(users_attributes(like))
    if isinstance(like, nn.Parameter):
        count_as_parameter(made)
    return _become_unbuilt(made, name)


def _lose_values(tensor: Tensor, name: str) -> None:
    """Let a tensor, for whoever has it, be one without values."""
    if not isinstance(tensor, UnbuiltTensor):
        swap_tensors(tensor, _unbuilt(tensor, name))


def _become_unbuilt(tensor: Tensor, name: str) -> UnbuiltTensor:
    tensor.__class__ = UnbuiltTensor
    vars(tensor)[_NAME] = name
    assert isinstance(tensor, UnbuiltTensor)
    return tensor


def _name_of(tensor: UnbuiltTensor) -> str:
    """The parameter that it is, or that it was computed from."""
    name: str = vars(tensor)[_NAME]
    return name


def _on_meta(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, UnbuiltTensor) else tensor.to("meta")


def _written(func: AnyCallable, name: str, args: Args, kwargs: Mapping[str, object]) -> object:
    """The arguments that a function writes to."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    return args[:1] if is_in_place(name) or func == SET_DATA else ()


def _needs_values(name: str, tensor: UnbuiltTensor) -> PlanError:
    return PlanError(
        f"{name} needs the values of {_name_of(tensor)}, or of what was computed from it while the model was built in"
        " configure_model or trainer.init_module(), where rank 0 alone has them with a pipeline. Register what a step"
        " reads of that as a buffer. Else build the model before, as in __init__: each rank then holds the whole of it"
        " until it is set up."
    )
