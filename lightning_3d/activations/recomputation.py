"""Recomputation of a block: its forward runs under torch's checkpoint, and again in its backward.

The second run finds the state of the first: random numbers, buffers, attributes, lists and caches among the arguments.
What it changes is put back, and hooks that only look are not called again. So a block does to the world around it what
it does without recomputation.

A block stands aside, and runs as it is, where its caller checkpoints it, or it checkpoints parts of itself: that is the
author's choice of what to compute again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.activations.block_state import BlockState, StateBefore
from lightning_3d.activations.kept_tensor import Keep, KeptTensor
from lightning_3d.activations.observing_hooks import Observers, observers_noted, without_observers
from lightning_3d.activations.selective import KeptResults
from lightning_3d.activations.shared_memory import Stretch, stretches
from lightning_3d.activations.torch_settings import TorchSettings
from lightning_3d.activations.transforms import transforms_refused
from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import Call
from lightning_3d.model.pytrees import as_called, flatten_call
from lightning_3d.torch_internals.autograd import (
    checkpoints_noted,
    has_reentrant_checkpoints,
    is_checkpointing,
    is_in_backward,
    next_node_number,
)
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.torch_internals.tensors import storage_of, untransformed, version_of

_NOT_COMPILED = (
    "activations.recompute runs blocks eagerly inside of code that torch.compile made. Compile the blocks by"
    " compile.enabled=true, or block by block, as by block.compile(); or leave them out of activations.blocks."
)


class Recomputation:
    """Runs the forwards of one block so that most of what they compute is not kept.

    Args:
        fqn: Name of the block.
        mode: ``"full"`` keeps its inputs, ``"selective"`` also the results of costly operators.
        generators: Those that it may draw from.
        whole: Applied to each leaf of its arguments: makes tensors of subclasses plain that stand for values to come.
        inputs: Makes the context in which its inputs are kept.
        keep: Keeps the results of costly operators.
    """

    def __init__(
        self,
        fqn: str,
        block: nn.Module,
        mode: Literal["full", "selective"],
        generators: Generators,
        whole: Callable[[Any], Any] = lambda leaf: leaf,
        inputs: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep: Keep = KeptTensor,
    ) -> None:
        self.whole, self._inputs, self.keep = whole, inputs, keep
        self.fqn, self.mode, self.generators = fqn, mode, generators
        self.modules = list(block.modules())
        self.state = BlockState(fqn, self.modules, generators)
        self.changed_inputs: Set[int] | None = None
        """The leaves of its arguments that a forward changes in place; None before the first one."""
        self.checkpoints_itself = False

    @torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
    def __call__(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call of the block."""
        stands_aside = self.checkpoints_itself or is_in_backward() or is_checkpointing()
        if stands_aside or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        is_first, first_node = self.changed_inputs is None, next_node_number()
        run = _Run(self, call, args, kwargs)
        with checkpoints_noted() as made, self._inputs(), transforms_refused(self.fqn):
            output = checkpoint(
                run, *run.kept(), use_reentrant=False, preserve_rng_state=False, context_fn=run.contexts
            )
        if is_first:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.checkpoints_itself = len(made) > 1 or has_reentrant_checkpoints(outputs, first_node)
        self.changed_inputs = run.changed_inputs
        return output


class _Run:
    """One forward of a block, and its recomputations."""

    def __init__(self, owner: Recomputation, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._owner, self._call = owner, call
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)  # until the forward has run
        leaves, self._with_leaves = flatten_call(args, kwargs)
        self._leaves = [owner.whole(leaf) for leaf in leaves]
        self.changed_inputs: Set[int] = frozenset()
        self._state: StateBefore
        self._settings = TorchSettings()
        self._observers: Observers = []
        self._results = KeptResults(owner.keep) if owner.mode == "selective" else None
        self._stretches: Sequence[Stretch] = ()
        self._of_block: dict[int, Tensor] = {}  # arguments in the memory of the block's own tensors

    def kept(self) -> list[Any]:
        """Leaves of the arguments for the recomputation: copies of what the forward changes."""
        if not any(map(self._may_change, range(len(self._leaves)))):
            return cast(list[Any], as_called(self._leaves))
        own = self._owner.state.storages()
        self._of_block = {i: leaf for i, leaf in enumerate(self._leaves) if _is_in(leaf, own) and self._may_change(i)}
        leaves = [None if i in self._of_block else leaf for i, leaf in enumerate(self._leaves)]
        self._stretches = stretches(leaves, self._may_change, self._owner.fqn)
        kept = [_copied(leaf) if self._may_change(i) else leaf for i, leaf in enumerate(leaves)]
        for stretch in self._stretches:
            for part in stretch.parts:
                kept[part.at] = None
            kept[stretch.parts[0].at] = stretch.copied(leaves)
        return cast(list[Any], as_called(kept))

    def _may_change(self, i: int) -> bool:
        changed = self._owner.changed_inputs
        return changed is None or i in changed

    def _leaves_of(self, kept: Sequence[Any], again: Callable[[Any, Set[int]], Any]) -> list[Any]:
        """The leaves of the arguments.

        Args:
            again: Applied to each tensor that was kept, and the indices of the leaves that are in it.
        """
        leaves = [again(leaf, {i}) for i, leaf in enumerate(kept)]
        for stretch in self._stretches:
            parts = {part.at for part in stretch.parts}
            for i, leaf in stretch.views(again(kept[stretch.parts[0].at], parts)):
                leaves[i] = leaf
        for i, leaf in self._of_block.items():
            leaves[i] = leaf.detach()
        return leaves

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Around the forward, and around its recomputations."""
        if self._results is None:
            return nullcontext(), nullcontext()
        return self._results.keeping(), _Anew(self._results.giving)

    def __call__(self, *kept: Any) -> Any:
        if self._given is None:
            return self._again(kept)
        (args, kwargs), self._given = self._given, None
        leaves, self._leaves = self._leaves, []
        versions = [version_of(leaf) if _is_versioned(leaf) else None for leaf in leaves]
        with (
            self._owner.state.before() as self._state,
            observers_noted(self._owner.modules, self._owner.generators) as self._observers,
        ):
            output = self._call(*args, **kwargs)
        pairs = enumerate(zip(leaves, versions, strict=True))
        changed = {i for i, (leaf, version) in pairs if version is not None and version_of(leaf) != version}
        self._check_copied(changed)
        if self._owner.changed_inputs is None:  # also what torch does not count: collectives, `tensor.data`
            before = self._leaves_of(kept, lambda leaf, _: leaf)
            changed.update(i for i, copy in enumerate(before) if _is_other(copy, leaves[i]))
        self.changed_inputs = changed | (self._owner.changed_inputs or frozenset())
        if self._results is not None:
            self._results.leave(output)
        return output

    def _check_copied(self, changed: set[int]) -> None:
        known = self._owner.changed_inputs
        if known is not None and not changed <= known:
            raise StepError(
                f"{self._owner.fqn} changed an argument in place, which its first training step left alone, so that its"
                " forward can't be computed again. Leave the block out of activations.blocks."
            )

    def _again(self, kept: Sequence[Any]) -> Any:
        leaves = self._leaves_of(kept, self._to_change)
        args, kwargs = self._with_leaves(as_called(leaves))
        with self._settings.back(), self._state.back(), without_observers(self._observers):
            return self._call(*args, **kwargs)

    def _to_change(self, kept: Any, within: Set[int]) -> Any:
        """A leaf that was kept, apart from the graph before it, or a copy of it where the forward changes it."""
        if kept is None or self.changed_inputs.isdisjoint(within):
            return _apart(kept)
        return kept.clone()


class _Anew(AbstractContextManager[None]):
    """A context that is made anew each time that it is entered.

    Args:
        make: Makes it.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make, self._entered = make, list[ExitStack]()

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self._make())
        self._entered.append(stack)

    def __exit__(self, *exc: Any) -> bool | None:
        return self._entered.pop().__exit__(*exc)


def _is_versioned(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def _is_in(leaf: Any, storages: Set[int]) -> bool:
    return bool(storages) and type(leaf) is Tensor and storage_of(leaf) in storages


def _copied(leaf: Any) -> Any:
    if type(leaf) is not Tensor:
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _apart(leaf: Any) -> Any:
    """The tensor without history: a hook that the block registers on its argument would run twice."""
    return leaf.detach().requires_grad_() if type(leaf) is Tensor and leaf.requires_grad else leaf


def _is_other(copy: Any, leaf: Any) -> bool:
    """Whether a tensor has other values than the copy that was kept of it, as far as torch can tell."""
    if type(leaf) is not Tensor or copy is leaf or leaf.layout is not torch.strided or leaf.is_nested:
        return False
    return untransformed(leaf) is leaf and not torch.equal(copy, leaf)
