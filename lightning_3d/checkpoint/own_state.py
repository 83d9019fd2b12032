"""The model's state that this rank holds, by FQN: that of its own blocks, in whatever placement.

Parameters and buffers of blocks on other pipeline ranks are on the meta device. Their names, shapes and order are known
here, so every rank sees the same list of FQNs; their values are left out.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextvars import ContextVar
from copy import copy
from itertools import chain
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.checkpoint.box import is_part
from lightning_3d.checkpoint.fail_alike import failing_alike
from lightning_3d.checkpoint.lazy import info_of, made, take
from lightning_3d.checkpoint.match import check_model
from lightning_3d.checkpoint.saved_state import unread
from lightning_3d.checkpoint.share import Share
from lightning_3d.errors import StepError
from lightning_3d.model.absent import stand_in
from lightning_3d.tensor.placement import marked

_is_reading: ContextVar[bool] = ContextVar("_is_reading", default=False)


def state_of(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` for code that knows that it has this rank's parts."""
    token = _is_reading.set(True)
    try:
        return module.state_dict()
    finally:
        _is_reading.reset(token)


def like_state(state: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by FQN in the form of ``module.state_dict()``, an OrderedDict that tells versions of modules, too."""
    formed = copy(state)
    formed.clear()
    formed.update(values)
    return formed


def warn_of_parts(module: nn.Module) -> None:
    """Warn in a ``state_dict()`` of this module, for code that does not know it; not in those of its copies."""
    module.register_state_dict_post_hook(_PartsWarning(weakref.ref(module)))


class _PartsWarning:
    """A hook after ``state_dict``.

    Args:
        original: The module that it warns of.
    """

    def __init__(self, original: weakref.ref[nn.Module] | None = None) -> None:
        self._original = original

    def __call__(self, module: nn.Module, state: Mapping[str, Any], *_: Any) -> None:
        num_parts = sum(is_part(value) for value in state.values())
        if num_parts and self._original is not None and self._original() is module and not _is_reading.get():
            rank_zero_warn(
                f"{num_parts} of the {len(state)} entries of this state_dict of {type(module).__name__} are shards, or"
                " lie on other pipeline stages (on the meta device): a file of it would not hold the model. Use"
                " trainer.save_checkpoint(path), or call state_dict() on every rank inside of `with"
                " trainer.strategy.summon_full_params():`."
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> _PartsWarning:
        return self

    def __reduce__(self) -> Any:
        """In a pickle of the module, which must hold all of it."""
        module = None if self._original is None else self._original()
        if module is not None and any(map(is_part, chain(module.parameters(), module.buffers()))):
            raise StepError(
                f"{type(module).__name__} can't be pickled, as this rank holds a part of it. Use"
                " trainer.save_checkpoint(path), or torch.save on every rank inside of `with"
                " trainer.strategy.summon_full_params():`."
            )
        return _PartsWarning, ()


def held_names(state: Mapping[str, Any]) -> set[str]:
    """Names of what this rank holds of a model's state."""
    present = {fqn: not value.is_meta for fqn, value in state.items() if isinstance(value, Tensor)}
    for fqn in state.keys() - present.keys():
        # Extra state belongs to the pipeline ranks that hold some of the tensors in its module, if there are any.
        owner = fqn.removesuffix(fqn.rpartition(".")[2])
        tensors = [is_present for other, is_present in present.items() if other.startswith(owner)]
        present[fqn] = any(tensors) or not tensors
    return {fqn for fqn, is_present in present.items() if is_present}


def shown_state(module: nn.Module) -> dict[str, Any]:
    """The model's state as hooks that save a checkpoint see it, under the names of one process on every rank.

    In place of tensors that another stage saves there are stand-ins, which have shapes alone. So a hook that drops,
    renames or adds entries does so on all ranks alike, and one that needs the values of a stand-in raises.
    """
    state, shown = state_of(module), dict[str, Any]()
    held = held_names(state)
    for fqn, value in state.items():
        if fqn in held:
            shown[fqn] = value
        elif isinstance(value, Tensor):
            place = "lies on another pipeline stage, which saves it"
            shown[fqn] = stand_in(value, f"checkpoint['state_dict'][{fqn!r}]", module, place)
    return like_state(state, shown)


def load_model(saved: Mapping[str, Any], module: nn.Module, *, strict: bool) -> None:
    """Give a model this rank's part of a saved state; a collective of all ranks.

    Args:
        saved: By FQN: full tensors, lazy ones, or shards as the module itself has them.
        module: The whole module; blocks of other stages are on the meta device and stay so.
        strict: Whether all FQNs must match; shapes must in any case.

    Raises:
        CheckpointError: The state does not fit, or can't be read; on all ranks. If it does not fit, nothing is changed.

    """
    state, parts, saved = state_of(module), marked(module), unread(saved)
    held = held_names(state)
    loaded = {fqn: value for fqn, value in state.items() if fqn in held and fqn in saved}
    with failing_alike("load the checkpoint"):
        found, wanted = ({fqn: info_of(value) for fqn, value in values.items()} for values in (saved, state))
        check_model(found, wanted, strict=strict)
        for fqn, value in loaded.items():
            if isinstance(value, Tensor):
                take(Share(value, parts.get(fqn)), saved[fqn])
            else:
                loaded[fqn] = made(saved[fqn])
    # Tensors alias the parameters, so this moves no other data; it runs the module's hooks and sets extra state.
    module.load_state_dict(loaded, strict=False)


def tied_fqns(module: nn.Module) -> dict[str, str]:
    """The first FQN of every parameter and buffer that has several, by its other FQNs."""
    first: dict[Tensor, str] = {}
    tied: dict[str, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    for fqn, tensor in chain(parameters, module.named_buffers(remove_duplicate=False)):
        if first.setdefault(tensor, fqn) != fqn:
            tied[fqn] = first[tensor]
    return tied
