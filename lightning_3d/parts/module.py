"""A module of which each rank holds a part, in the hands of code that knows nothing of it.

``load_state_dict`` takes full values, of which each rank keeps its part; what is on other pipeline stages raises where
its values are needed, and ``to`` and the like leave it alone; ``state_dict`` warns that it gives parts, and a pickle is
refused. Copies (``copy.deepcopy``) do all of this, too, but for the warning.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import chain
from types import MethodType

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.checkpoint.box import is_part
from lightning_3d.checkpoint.own_state import expects_parts
from lightning_3d.errors import StepError
from lightning_3d.model.absent import Stages, mark_absent
from lightning_3d.model.block_runner import SUMMON, runner_of
from lightning_3d.parts.part_tensor import own_part, watch_parts
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.sharding.placement import marks_hidden, marks_of
from lightning_3d.torch_internals.fsdp_units import let_be_copied, without_units
from lightning_3d.torch_internals.modules import APPLY, buffers_of, parameters_of


def holds_parts(module: nn.Module) -> bool:
    """Whether this rank lacks something of the module."""
    return any(map(is_part, chain(module.parameters(), module.buffers())))


def answer_for_parts(module: nn.Module, rendezvous: Rendezvous, stages: Stages, *, model: nn.Module) -> None:
    """Let a module that holds parts answer as described above.

    Args:
        stages: The module's.
        model: The one that it is, or is a copy of.
    """
    if not holds_parts(module):
        return
    mark_absent(module, stages)
    watch_parts(module, rendezvous)
    for owner in module.modules():
        if isinstance(owner, FSDPModule):
            let_be_copied(owner)
        if any(map(is_part, (*parameters_of(owner).values(), *buffers_of(owner).values()))):
            owner.register_load_state_dict_pre_hook(_take_parts)
    module.register_state_dict_post_hook(_PartsWarning(weakref.ref(model)))
    vars(module)[APPLY] = MethodType(_apply_to_present, module)


def as_built(module: nn.Module) -> ExitStack:
    """Let a module whose tensors are full run its own forward, without anything that served its parts, until the end of
    what this returns.
    """
    undone = ExitStack()
    for inner in list(module.modules()):
        if (runner := runner_of(inner)) is not None:
            undone.enter_context(runner.unpatched())
        if APPLY in vars(inner):
            undone.callback(vars(inner).update, {APPLY: vars(inner).pop(APPLY)})
    undone.enter_context(without_units(module))
    undone.enter_context(marks_hidden(module))
    return undone


class _PartsWarning:
    """A hook after ``state_dict``, for code that does not know that it gets parts.

    Args:
        original: The module that it warns of.
    """

    def __init__(self, original: weakref.ref[nn.Module] | None = None) -> None:
        self._original = original

    def __call__(self, module: nn.Module, state: Mapping[str, object], *_: object) -> None:
        num_parts = sum(is_part(value) for value in state.values())
        if num_parts and self._original is not None and self._original() is module and not expects_parts.get():
            rank_zero_warn(
                f"{num_parts} of the {len(state)} entries of this state_dict of {type(module).__name__} are shards, or"
                " lie on other pipeline stages (on the meta device): a file of it would not hold the model. Use"
                " trainer.save_checkpoint(path), or call state_dict() on every rank inside of `with"
                " trainer.strategy.summon_full_params():`."
            )

    def __deepcopy__(self, memo: dict[int, object]) -> _PartsWarning:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """In a pickle of the module, which must hold all of it."""
        module = None if self._original is None else self._original()
        if module is not None and holds_parts(module):
            raise StepError(
                f"{type(module).__name__} can't be pickled, as this rank holds a part of it. Use"
                " trainer.save_checkpoint(path), or torch.save on every rank inside of `with"
                " trainer.strategy.summon_full_params():`."
            )
        return _PartsWarning, ()


def _take_parts(
    module: nn.Module, state_dict: dict[str, object], prefix: str, local_metadata: Mapping[str, object], *_: object
) -> None:
    parts = marks_of(module)
    for name, tensor in (*parameters_of(module).items(), *buffers_of(module).items()):
        value = state_dict.get(prefix + name)
        if tensor is None or not is_part(tensor) or not isinstance(value, Tensor):
            continue
        if local_metadata.get("assign_to_params_buffers"):
            raise StepError(
                f"load_state_dict(assign=True) would put another tensor in place of {prefix}{name}, of which this rank"
                " holds a part. Use assign=False."
            )
        if not is_part(value) and value.shape == tensor.shape:
            if tensor.is_meta:
                tensor.detach().copy_(value)  # raises for another parameter of this stage
            state_dict[prefix + name] = own_part(value, tensor, parts.get(name))


def _apply_to_present(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of ``nn.Module._apply``: what is on other pipeline stages stays on meta."""
    shards = [parameter for parameter in module.parameters() if isinstance(parameter, DTensor)]
    if all(change(shard) is shard for shard in shards) and shards:
        return module
    try:
        return getattr(type(module), APPLY)(module, lambda t: t if t.is_meta else change(t), recurse)  # type: ignore[no-any-return]
    except RuntimeError as error:
        raise StepError(
            f"The shards of {type(module).__name__} can't be moved or converted ({error}). Copy the module {SUMMON},"
            " and move the copy."
        ) from error
