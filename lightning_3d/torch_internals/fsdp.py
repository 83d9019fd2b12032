"""FSDP2: the memory in which units keep their shards, and their state between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, RegisterPostBackwardFunction
from torch.distributed.tensor import DTensor

from lightning_3d.torch_internals.dispatch import DisableTorchFunctionSubclass
from lightning_3d.torch_internals.dtensor import spec_of
from lightning_3d.torch_internals.patches import replaced


def make_root(unit: FSDPModule) -> None:
    """Let a unit be the root of those inside of it; else the first that runs a forward is one, as for a summary."""
    fully_shard.state(unit)._lazy_init()  # type: ignore[attr-defined]


def reset(root: FSDPModule, parameters: Iterable[nn.Parameter]) -> None:
    """Bring all units to where they are between steps, with the gradients of their sharded parameters.

    ``reset_iter_state`` serves steps that failed, and drops gradients since torch 2.15.
    """
    with DisableTorchFunctionSubclass():
        gradients = [(parameter, parameter.grad) for parameter in parameters]
        root.reset_iter_state()
        for parameter, gradient in gradients:
            if gradient is not None:
                parameter.grad = gradient


@contextmanager
def waits_replaced(run: Callable[..., object]) -> Iterator[None]:
    """Let units call ``run(group, call)`` where the present stream waits for parameters, or for reduced gradients."""

    def measured(name: str) -> Callable[[FSDPParamGroup], object]:
        original = getattr(FSDPParamGroup, name)
        return lambda units: run(units._all_gather_process_group, lambda: original(units))

    names = ("wait_for_unshard", "finalize_backward")
    with replaced("measured collectives", FSDPParamGroup, {name: measured(name) for name in names}):
        yield


def is_hook_of_fsdp(hook: object) -> bool:
    """Whether a hook on the gradient of a unit's output asks only when it comes, to gather parameters."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("torch.distributed.fsdp.")


def passes_tensors_on(function: type[torch.autograd.Function]) -> bool:
    """Whether an autograd function gives a unit's arguments on as they are, to run code after its backward."""
    return function is RegisterPostBackwardFunction


def groups_of(unit: FSDPModule) -> Iterator[Any]:
    """The groups of parameters of a unit."""
    yield from fully_shard.state(unit)._fsdp_param_groups  # type: ignore[attr-defined]


def shards_of(unit: FSDPModule) -> list[Tensor]:
    """The memory of the shards of a unit's own parameters, padding included."""
    return [sharded._sharded_param_data for group in groups_of(unit) for sharded in group.fsdp_params]


@dataclass(frozen=True)
class UnitParameter:
    """One parameter of a unit, which several may refer to."""

    _parameter: Any

    @property
    def sharded(self) -> nn.Parameter:
        """This rank's shard, a DTensor."""
        parameter: nn.Parameter = self._parameter.sharded_param
        return parameter

    @property
    def gathered(self) -> nn.Parameter:
        """The parameter of modules while the unit is gathered; there from the first time on."""
        parameter: nn.Parameter = self._parameter.unsharded_param
        return parameter

    @property
    def memory(self) -> Tensor:
        """The memory that it is gathered into, padding included; likewise."""
        memory: Tensor = self._parameter.all_gather_outputs[0]
        return memory

    def gather_in(self, dtype: torch.dtype, stand_in: Callable[[Tensor], Tensor]) -> nn.Parameter:
        """From now on gather it in another dtype; the unit has been gathered, and is not now.

        Args:
            stand_in: Makes what modules have while it is gathered, of the memory that it is gathered into.
        """
        own, size = self._parameter, self._parameter.shard_mesh.size()
        own.param_dtype, own.all_gather_outputs = dtype, []
        own.init_dtype_attrs = lambda policy: None  # the unit's ``unshard()`` would set it back to the policy's
        own.init_all_gather_outputs([own._sharded_param_data.numel()], [dtype], size, own.device)
        half = torch.as_strided(own.all_gather_outputs[0], own._orig_size, own._contiguous_orig_stride)
        stand = stand_in(half)
        if isinstance(before := own._unsharded_param, DTensor):  # tensor parallel shards it, too
            stand = DTensor(stand, spec_of(before), requires_grad=False)
        own._unsharded_param = nn.Parameter(stand, requires_grad=self.sharded.requires_grad)
        own.free_unsharded_param()
        return self.gathered


def parameters_of_unit(unit: FSDPModule) -> list[UnitParameter]:
    """A unit's own parameters, which it gathers together."""
    return [UnitParameter(parameter) for group in groups_of(unit) for parameter in group.fsdp_params]


def move_shards(unit: FSDPModule, memory: Callable[[torch.Size, torch.dtype], Tensor]) -> None:
    """Let the shards of a unit's own parameters lie in other memory; parameters stay the same objects.

    Args:
        memory: Makes a tensor on the CPU, for a unit with ``CPUOffloadPolicy(pin_memory=False)``.
    """
    for group in groups_of(unit):
        for sharded in group.fsdp_params:
            local = sharded.sharded_param._local_tensor
            padded = memory(sharded.padded_sharded_param_size, local.dtype)
            padded.view(-1).copy_(sharded._sharded_param_data)
            sharded._sharded_param_data = padded.view(-1)
            dim = sharded.fsdp_placement.dim
            length = local.size(dim) if local.numel() else 0
            sharded.sharded_param._local_tensor = padded.narrow(dim, 0, length)


def gather_in_backward(unit: FSDPModule, tensor: Tensor) -> None:
    """Have a unit gathered when the gradient of a tensor comes, as FSDP2 does for those that a unit returns."""
    tensor.register_hook(fully_shard.state(unit)._pre_backward)  # type: ignore[attr-defined]


def is_refusal_of_changes(error: RuntimeError) -> bool:
    """Whether torch raised it because a unit changed an argument in place, of which FSDP2 gives it a view."""
    return "RegisterPostBackwardFunction" in str(error)


def when_gathered(unit: FSDPModule, gathered: Callable[[list[Tensor]], None]) -> None:
    """Call a function with the memory of a unit's shards whenever they have been copied to be gathered.

    A custom all-gather would not do: a mesh of one rank has none.
    """
    for group in groups_of(unit):
        group._to_unsharded = _Then(group, group._to_unsharded, gathered)


class _Then:
    def __init__(
        self, group: FSDPParamGroup, become: Callable[[], None], gathered: Callable[[list[Tensor]], None]
    ) -> None:
        self._group, self._become, self._gathered = group, become, gathered

    def __call__(self) -> None:
        self._become()
        self._gathered([sharded._sharded_param_data for sharded in self._group.fsdp_params])


def drop_gradients(unit: FSDPModule) -> None:
    """Let go of the gradients of a unit's gathered parameters."""
    for group in groups_of(unit):
        for sharded in group.fsdp_params:
            sharded.unsharded_accumulated_grad = None
            if hasattr(sharded, "_unsharded_param"):  # it was gathered
                sharded.unsharded_param.grad = None
