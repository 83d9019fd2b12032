"""Recomputation of a block: its forward runs under torch's checkpoint, and again in its backward.

The second run finds the state of the first: random numbers, buffers, attributes, lists and caches among the arguments.
What it changes is put back, and hooks that only look are not called again. So a block does to the world around it what
it does without recomputation.

A block runs as it is where its caller checkpoints it, or it checkpoints parts of itself: that is the author's choice of
what to compute again. So it does inside of transforms of ``torch.func``, and where tensors take the place of its
parameters, as by ``torch.func.functional_call``: both have ended when its backward comes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.activations.block_state import StateBefore, storages_of_state
from lightning_3d.activations.observing_hooks import ObservingHooks
from lightning_3d.activations.saved_tensor import Save, SavedTensor
from lightning_3d.activations.selective import KeptResults
from lightning_3d.distributed.rng import Generators
from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.model.pytrees import as_called, flatten_call
from lightning_3d.torch_internals.autograd import (
    checkpoints_noted,
    has_reentrant_checkpoints,
    is_checkpointing,
    is_in_backward,
    next_node_number,
)
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.pytree import Args, Arguments, Kwargs, tree_leaves
from lightning_3d.torch_internals.tensors import are_transforms_active, storage_of, untransformed, version_of

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
        whole: Callable[[object], Any] = lambda leaf: leaf,
        inputs: Callable[[], AbstractContextManager[None]] = nullcontext,
        keep: Save = SavedTensor,
    ) -> None:
        self.whole, self._inputs, self.keep = whole, inputs, keep
        self.fqn, self.mode, self.generators = fqn, mode, generators
        self.modules = list(block.modules())
        self.changed_inputs: Set[int] | None = None
        """The leaves of its arguments that a forward changes in place; None before the first one."""
        self.checkpoints_itself = False

    @torch.compiler.disable(reason=_NOT_COMPILED)  # type: ignore[untyped-decorator]
    def __call__(self, call: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        """Make a call of the block."""
        stands_aside = self.checkpoints_itself or is_in_backward() or is_checkpointing()
        if stands_aside or not torch.is_grad_enabled() or are_transforms_active() or self._has_other_weights():
            return call(*args, **kwargs)
        is_first, first_node = self.changed_inputs is None, next_node_number()
        run = _Run(self, call, args, kwargs)
        with checkpoints_noted() as made, self._inputs():
            output = checkpoint(
                run, *run.saved(), use_reentrant=False, preserve_rng_state=False, context_fn=run.contexts
            )
        if is_first:
            outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            self.checkpoints_itself = len(made) > 1 or has_reentrant_checkpoints(outputs, first_node)
        self.changed_inputs = run.changed_inputs
        return output

    def _has_other_weights(self) -> bool:
        weights = (weight for module in self.modules for weight in parameters_of(module).values())
        return any(not isinstance(weight, nn.Parameter) for weight in weights if weight is not None)


class _Run:
    """One forward of a block, and its recomputations."""

    def __init__(self, owner: Recomputation, call: AnyCallable, args: Args, kwargs: Kwargs) -> None:
        self._owner, self._call = owner, call
        self._given: Arguments | None = (args, kwargs)  # until the forward has run
        leaves, self._with_leaves = flatten_call(args, kwargs)
        self._leaves = [owner.whole(leaf) for leaf in leaves]
        firsts: dict[Hashable, int] = {}
        self._same = [firsts.setdefault(_place(leaf), i) for i, leaf in enumerate(self._leaves)]
        self.changed_inputs: Set[int] = frozenset()
        self._state = StateBefore(owner.fqn, owner.modules, owner.generators)
        self._hooks = ObservingHooks(owner.modules, owner.generators)
        self._results = KeptResults(owner.keep) if owner.mode == "selective" else None

    def saved(self) -> list[object]:
        """Leaves of the arguments for the recomputation: copies of what the forward may change."""
        known = self._owner.changed_inputs
        saved = [_copied(leaf) if known is None or i in known else leaf for i, leaf in enumerate(self._leaves)]
        return cast(list[object], as_called(saved))

    def contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Around the forward, and around its recomputations."""
        if self._results is None:
            return nullcontext(), nullcontext()
        return self._results, self._results.giving()

    def __call__(self, *saved: Any) -> object:
        if self._given is None:
            return self._again(saved)
        (args, kwargs), self._given = self._given, None
        leaves, self._leaves = self._leaves, []
        versions = [version_of(leaf) if _is_versioned(leaf) else None for leaf in leaves]
        with self._state.forward(), self._hooks.noted():
            output = self._call(*args, **kwargs)
        pairs = enumerate(zip(leaves, versions, strict=True))
        changed = {i for i, (leaf, version) in pairs if version is not None and version_of(leaf) != version}
        known = self._owner.changed_inputs
        if known is None:  # also what torch does not count: collectives, `tensor.data`
            changed.update(i for i, copy in enumerate(saved) if _is_other(copy, leaves[i]))
        self._check_copied(changed, leaves)
        self.changed_inputs = changed | (known or frozenset())
        if self._results is not None:
            self._results.end(output)
        return output

    def _check_copied(self, changed: Set[int], leaves: Sequence[Any]) -> None:
        known, fqn = self._owner.changed_inputs, self._owner.fqn
        if known is not None and not changed <= known:
            raise StepError(
                f"{fqn} changed an argument in place, which its first training step left alone, so that its forward"
                " can't be computed again. Leave the block out of activations.blocks."
            )
        own = storages_of_state(self._owner.modules) if changed else frozenset[int]()
        for i in changed:
            others = (leaf for leaf, first in zip(leaves, self._same, strict=True) if first != self._same[i])
            if storage_of(leaves[i]) in own or any(_shares_memory(leaves[i], leaf) for leaf in others):
                raise StepError(
                    f"{fqn} changes an argument in place that lies in the memory of another one, or of a buffer of its"
                    " own, so that its forward can't be computed again. Give it a clone, or leave the block out of"
                    " activations.blocks."
                )

    def _again(self, saved: Sequence[Any]) -> object:
        made = [saved[i].clone() if i in self.changed_inputs else _apart(saved[i]) for i in range(len(saved))]
        args, kwargs = self._with_leaves(as_called([made[first] for first in self._same]))
        with self._state.back(), self._hooks.left_out(self._owner.fqn):
            return self._call(*args, **kwargs)


def _is_versioned(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_inference()


def _place(leaf: object) -> Hashable:
    """Equal for a tensor that is given several times."""
    if type(leaf) is not Tensor or (storage := storage_of(leaf)) is None:
        return id(leaf)
    return storage, int(leaf.storage_offset()), leaf.shape, leaf.stride(), leaf.dtype


def _shares_memory(one: Tensor, other: object) -> bool:
    return isinstance(other, Tensor) and storage_of(one) is not None and storage_of(one) == storage_of(other)


def _copied(leaf: object) -> object:
    if type(leaf) is not Tensor:
        return leaf
    return leaf.detach().clone().requires_grad_(leaf.requires_grad)


def _apart(leaf: object) -> object:
    """The tensor without history: a hook that the block registers on its argument would run twice."""
    return leaf.detach().requires_grad_() if type(leaf) is Tensor and leaf.requires_grad else leaf


def _is_other(copy: Any, leaf: object) -> bool:
    """Whether a tensor has other values than the copy that was kept of it, as far as torch can tell."""
    if type(leaf) is not Tensor or copy is leaf or leaf.layout is not torch.strided or leaf.is_nested:
        return False
    return untransformed(leaf) is leaf and not torch.equal(copy, leaf)
