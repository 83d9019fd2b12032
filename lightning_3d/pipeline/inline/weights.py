"""Parameters and buffers of blocks in the hands of code outside of them: a codebook, a tied table, the weight of the
last layer by whose gradients two losses are balanced.

The rank that has the block sends the value to the others, whose copies take part in their graphs; a gradient counts
where the parameter is. It is sent when code reads an attribute, or calls a function of torch on a parameter that it has
from ``parameters()``, an optimizer or a list of its own; a function that changes one in place goes to those that have
it. Of ``torch.autograd.grad`` with respect to such a weight the others run the same part of the backward, down to what
its block gave, and receive the result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_3d.errors import StepError
from lightning_3d.frames import module_of, with_callers
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.pipeline.inline.exchange import Exchange
from lightning_3d.torch_internals.autograd import transforms_given
from lightning_3d.torch_internals.dispatch import GET_DATA, is_in_place, used_together, without_function_mode
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.torch_internals.patches import replaced
from lightning_3d.torch_internals.pytree import Args, Kwargs, tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import without_transforms
from lightning_3d.trace.interception import reads_meta_only

_ALIASES = (GET_DATA, Tensor.detach, torch.detach)
_OF_GRADIENTS = (
    *(Tensor.grad.__get__, torch.autograd.grad, torch.autograd.backward, Tensor.backward),  # type: ignore[union-attr]
)
_MODULES = ("torch.nn.modules.module", "torch.nn.parameter", "torch.distributed.")


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """The block that a tensor is of."""

    fqn: str
    owner_rank: int
    """Index on the pp axis of the rank that has it."""


class _Functions(TorchFunctionMode):
    """Shows the functions of torch that code outside of blocks calls.

    Args:
        call: Calls one; the first argument is the frame that did.
    """

    def __init__(self, call: Callable[..., object]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        if torch.compiler.is_compiling() or reads_meta_only(func):
            return func(*args, **(kwargs or {}))
        return self._call(sys._getframe(1), func, args, kwargs or {})


def _is_of_modules(caller: FrameType) -> bool:
    """Whether it is code by which modules move, copy and save what a rank has of them."""
    return module_of(caller).startswith(_MODULES)


def _steps(caller: FrameType) -> bool:
    """Whether it is code of this package, or of an optimizer's step, which run for what a rank has."""
    frames = ((frame, module_of(frame)) for frame in with_callers(caller))
    frame, module = next(found for found in frames if found[1].startswith(("lightning_3d.", "torch.optim.optimizer")))
    return frame is caller or module == "torch.optim.optimizer"


def _unread(name: str, args: Args, kwargs: Kwargs) -> Any:
    """The arguments of a function that changes weights; without data those by which one changes that is elsewhere."""
    groups = [group for group in used_together(name, args, kwargs) if isinstance(group[0], Tensor) and group[0].is_meta]
    unread = {id(tensor) for _, *others in groups for tensor in others}

    def without_data(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if id(tensor) in unread else tensor

    return tree_map_only(Tensor, without_data, (args, kwargs))


def has_given_weights(block: nn.Module) -> bool:
    """Whether something else stands in place of a parameter, as ``torch.func.functional_call`` puts it there."""
    if isinstance(block, FSDPModule):  # its hooks do
        return False
    return any(_is_given(module, name) for module in block.modules() for name in parameters_of(module))


def _is_given(module: nn.Module, name: str) -> bool:
    value: Tensor | None = parameters_of(module).get(name)
    return value is not None and not isinstance(value, nn.Parameter)


class BlockWeights:
    """Answers reads of tensors of blocks in a step, and gradients with respect to them.

    Args:
        module: The user's, some of whose parameters may be those of a block.
        blocks: FQN -> block.
        owner_ranks: FQN of a block -> index on the pp axis of the rank that has it.
    """

    def __init__(
        self, module: nn.Module, blocks: Mapping[str, nn.Module], owner_ranks: Mapping[str, int], exchange: Exchange
    ) -> None:
        self._exchange = exchange
        owners = [(_Owner(fqn=fqn, owner_rank=owner_ranks[fqn]), block) for fqn, block in blocks.items()]
        self._owners = {inner: owner for owner, block in owners for inner in block.modules()}
        self._parameters: dict[Tensor, _Owner] = {p: owner for owner, block in owners for p in block.parameters()}
        self._tied = {
            (inner, name): self._parameters[parameter]
            for inner in module.modules()
            for name, parameter in parameters_of(inner).items()
            if inner not in self._owners and parameter in self._parameters
        }
        self._read: dict[object, Tensor] = {}  # since a step began, or an optimizer stepped; buffers by their place
        self._sources: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # another name or value -> the parameter
        self._functions = _Functions(self._call)
        self._is_in_glue: Callable[[], bool] = lambda: False
        self._is_unseen = False

    def forget(self) -> None:
        """Tensors may have changed."""
        self._read.clear()
        self._exchange.edges.clear()

    @contextmanager
    def shown(self, is_in_glue: Callable[[], bool]) -> Iterator[None]:
        """Answer inside.

        Args:
            is_in_glue: Whether the present code is outside of blocks, and so runs on all ranks.
        """
        read, differentiate = nn.Module.__getattr__, torch.autograd.grad

        def shown(module: nn.Module, name: str) -> object:
            value = read(module, name)
            owner = self._owner_of(module, name) if isinstance(value, Tensor) else None
            if owner is None or _is_given(module, name) or not is_in_glue() or _is_of_modules(sys._getframe(1)):
                return value
            assert isinstance(value, Tensor)
            return self._value(value if value in self._parameters else (module, name), value, owner, name)

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> object:
            given = list(inputs) if isinstance(inputs, Sequence) else [inputs]
            owners = [self._owner(tensor) for tensor in given]
            if not is_in_glue() or not any(owners):
                return differentiate(outputs, inputs, *args, **kwargs)
            return self._gradients(differentiate, outputs, given, owners, *args, **kwargs)

        self.forget()
        self._is_in_glue = is_in_glue
        getting = replaced("weights", nn.Module, {"__getattr__": shown})
        differentiating = replaced("differentiation", torch.autograd, {"grad": grad})
        with getting, differentiating, transforms_given(self.with_values), self._functions:
            try:
                yield
            finally:
                self.forget()

    def paused(self) -> AbstractContextManager[None]:
        """Run a block's own code: its functions are not seen."""
        return without_function_mode(self._functions)

    def _call(self, caller: FrameType, func: AnyCallable, args: Args, kwargs: Kwargs) -> object:
        """Call a function of torch with the values of the weights that it reads."""
        if not self._sees((args, kwargs)) or func in _OF_GRADIENTS or _is_of_modules(caller) or _steps(caller):
            return func(*args, **kwargs)
        if func in _ALIASES:
            return self._note(func(*args, **kwargs), self._source(args[0]))
        name = getattr(func, "__name__", "")
        is_first_changed = is_in_place(name) or name in ("__set__", "__delete__")
        changed = {id(t): t for t in tree_leaves(args[:1] if is_first_changed else kwargs.get("out"))}
        args, kwargs = tree_map_only(Tensor, lambda t: t if id(t) in changed else self._given(t), (args, kwargs))
        if self._sees(list(changed.values())):
            args, kwargs = _unread(name, args, kwargs)
        for tensor in changed.values():
            self._read.pop(self._source(tensor), None)
        with self._unseen():
            return func(*args, **kwargs)

    def with_values(self, tree: object) -> Any:
        """Put the values of weights in their place, if code outside of blocks reads them."""
        return tree_map_only(Tensor, self._given, tree) if self._sees(tree) else tree

    def _sees(self, tree: object) -> bool:
        has_weights = not self._is_unseen and any(self._source(leaf) is not None for leaf in tree_leaves(tree))
        return has_weights and self._is_in_glue()

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Run what a function of torch or a read does itself."""
        before, self._is_unseen = self._is_unseen, True
        try:
            yield
        finally:
            self._is_unseen = before

    def _given(self, tensor: Tensor) -> Tensor:
        if (source := self._source(tensor)) is None:
            return tensor
        owner = self._parameters[source]
        value = self._value(source, source, owner, "weight")
        if owner.owner_rank == self._exchange.pp_rank:
            return tensor
        return value if isinstance(tensor, nn.Parameter) else value.detach()

    def _value(self, key: object, tensor: Tensor, owner: _Owner, name: str) -> Tensor:
        if key not in self._read:
            with without_transforms(), self._unseen():
                read = self._exchange.read(f"a {name} of {owner.fqn}", tensor, owner.owner_rank)
            self._read[key] = self._note(read, self._source(tensor))
        return self._read[key]

    def _note(self, tensor: Tensor, source: Tensor | None) -> Tensor:
        if source is not None and tensor is not source:
            self._sources[tensor] = source
        return tensor

    def _source(self, tensor: object) -> Tensor | None:
        """The parameter of a block that a tensor is, or is the value or another name of."""
        if not isinstance(tensor, Tensor):
            return None
        return tensor if tensor in self._parameters else self._sources.get(tensor)

    def _owner(self, tensor: object) -> _Owner | None:
        source = self._source(tensor)
        return None if source is None else self._parameters[source]

    def _owner_of(self, module: nn.Module, name: str) -> _Owner | None:
        return self._owners.get(module) or self._tied.get((module, name))

    def _gradients(
        self,
        differentiate: Callable[..., Sequence[Tensor | None]],
        outputs: object,
        given: Sequence[Any],
        owners: Sequence[_Owner | None],
        grad_outputs: object = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool | None = None,
        **others: object,
    ) -> tuple[Tensor | None, ...]:
        if create_graph:
            raise StepError(
                f"torch.autograd.grad with respect to a weight of {next(o for o in owners if o is not None).fqn} was"
                " called with create_graph=True, but with a pipeline one rank has its graph. Use"
                " pipeline_parallel_size=1."
            )
        absent = {owner.fqn for owner in owners if owner is not None and owner.owner_rank != self._exchange.pp_rank}
        edges = [edge for fqn in absent for edge in self._exchange.edges.get(fqn, ())]
        inputs = [tensor for tensor in given if not (isinstance(tensor, Tensor) and tensor.is_meta)]
        found = differentiate(outputs, [*inputs, *edges], grad_outputs, retain_graph, allow_unused=True, **others)
        of_inputs = iter(found)
        results: list[Tensor | None] = []
        for tensor, owner in zip(given, owners, strict=True):
            own = None if isinstance(tensor, Tensor) and tensor.is_meta else next(of_inputs)
            results.append(own if owner is None else self._exchange.same(owner.fqn, own, tensor, owner.owner_rank))
        if not allow_unused and any(result is None for result in results):
            raise RuntimeError("One of the differentiated tensors was not used in the graph: set allow_unused=True.")
        return tuple(results)
