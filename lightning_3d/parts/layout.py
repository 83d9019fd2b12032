"""The layouts that models have, for those that get another one: a second Trainer, with a strategy of its own.

Every module of a model knows the model's layout, so that another model that shares modules with it finds it, too, as
one that is finetuned from another's backbone.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import nn

from lightning_3d.distributed.mesh import Mesh
from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON
from lightning_3d.parts.copies import copy_in, is_held_as
from lightning_3d.parts.full_params import full_params, stay_full
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.torch_internals.fsdp_units import reshard_units
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map

LAYOUT = "_lightning_3d_layout"
"""Attribute of a module: the layout that its model has."""


@dataclass(eq=False)
class Layout:
    """How a model lies on the ranks; copies and pickles of a module have none."""

    module: nn.Module
    mesh: Mesh
    device: torch.device
    copies: list[nn.Module] = field(default_factory=list)
    """Copies of the model that have the same layout."""
    modules: list[nn.Module] = field(init=False)
    """The model's modules, and `parameters`: as they were laid out."""
    parameters: list[nn.Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.modules, self.parameters = list(self.module.modules()), _parameters(self.module)

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


def shard_layout(layout: Layout) -> None:
    """Note that a model has a layout, in all of its modules."""
    for inner in layout.modules:
        vars(inner)[LAYOUT] = layout


def has_some_layout(module: nn.Module) -> bool:
    """Whether any of its modules has one, of whichever Trainer."""
    return any(LAYOUT in vars(inner) for inner in module.modules())


def check_layout(module: nn.Module, layout: Layout | None, what: str) -> None:
    """Raise if a model has not the layout of a Trainer.

    Args:
        what: What was done, for the message.

    Raises:
        StepError: the model has none yet, or that of another Trainer.
    """
    if layout is None:
        raise StepError(
            f"No run of this Trainer has set up {type(module).__name__}, and {what}. Call fit, validate, test or"
            " predict before."
        )
    if vars(module).get(LAYOUT) is not layout:
        raise StepError(
            f"{type(module).__name__} has got the layout of another Trainer since this one ran it, and {what} by this"
            " one. Do it by the Trainer that ran it last."
        )


def is_laid_out(module: nn.Module, layout: Layout) -> bool:
    """Whether it is this one that the model has, with the modules and parameters that it had: others may have been put
    in between two runs.
    """
    now, before = [*module.modules(), *_parameters(module)], [*layout.modules, *layout.parameters]
    return vars(module).get(LAYOUT) is layout and len(now) == len(before) and all(map(is_, now, before))


@contextmanager
def summoned(
    layout: Layout, module: nn.Module | None, rendezvous: Rendezvous, *, is_in_parts: bool, writeback: bool
) -> Iterator[None]:
    """Let a model be plain and whole on every rank inside; every rank enters and leaves.

    Args:
        module: The model (by default), a module in it, or a copy of it.
        is_in_parts: Whether ranks hold parts of it.
        writeback: Whether what is written inside stays.

    Raises:
        StepError: the module is none of these, or a copy from before the model had this layout.
    """
    root = layout.module
    module = root if module is None else module
    if all(module is not inner for inner in root.modules()):
        name = type(root).__name__
        if (copied := copy_in(module, root)) is None:
            raise StepError(
                f"{type(module).__name__} is not the {name} that this strategy trains, nor a module in it, nor a copy"
                " of it."
            )
        if not is_held_as(copied, root):
            raise StepError(
                f"This copy of {name} has the parts that another Trainer gave the model, which has another layout now."
                f" Copy the model {SUMMON}."
            )
        root = copied
    if is_in_parts:
        rendezvous.sync_check(range(layout.mesh.shape.world_size), "summon_full_params")
    with full_params(root, module, layout.mesh, layout.device, writeback=writeback):
        yield


def unshard(module: nn.Module, copies: Sequence[nn.Module]) -> None:
    """Let a model be as it was built, and others that share modules with it, if they have layouts; every rank calls it.

    Args:
        copies: Copies of the model, of which those that were made while it had a layout are whole with it.
    """
    layouts = dict.fromkeys(found for inner in module.modules() if (found := vars(inner).get(LAYOUT)) is not None)
    for layout in layouts:
        further = copies if layout.module is module else ()
        present = set(layout.module.modules())
        removed = [inner for inner in layout.modules if inner not in present]
        for held in dict.fromkeys([layout.module, *layout.copies, *further, *removed]):
            stay_full(held, layout.mesh, layout.device)
        for inner in layout.modules:
            vars(inner).pop(LAYOUT, None)


def full_modules(
    checkpoint: Mapping[str, object], model: nn.Module, summoned: AbstractContextManager[None], *, is_saved_here: bool
) -> dict[str, object]:
    """A checkpoint with whole copies in place of modules of the model, as ``save_hyperparameters()`` puts them there;
    every rank calls it.

    Args:
        summoned: Lets the model be whole on every rank inside.
        is_saved_here: Whether this rank writes them.
    """
    inner, memo = set(model.modules()), dict[int, object]()

    def is_inner(leaf: object) -> bool:
        return isinstance(leaf, nn.Module) and leaf in inner

    def copied(leaf: object) -> object:
        if not is_inner(leaf):
            return leaf
        return copy.deepcopy(leaf, memo) if is_saved_here else None

    places = [key for key, value in checkpoint.items() if any(map(is_inner, tree_leaves(value)))]
    with summoned if places else nullcontext():
        return {**checkpoint, **{key: tree_map(copied, checkpoint[key]) for key in places}}


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    reshard_units(module)
    return list(module.parameters())
