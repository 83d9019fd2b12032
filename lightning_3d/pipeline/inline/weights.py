"""Parameters and buffers of blocks in the hands of code outside of them: a codebook, a tied table, the weight of the
last layer by whose gradients two losses are balanced.

The rank that has the block sends the value to the others, whose copies take part in their graphs; a gradient counts
where the parameter is. Of ``torch.autograd.grad`` with respect to such a weight the others run the same part of the
backward, down to what its block gave, and receive the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.errors import StepError
from lightning_3d.pipeline.inline.exchange import Exchange
from lightning_3d.torch_internals.modules import attributes_replaced, parameters_of


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """The block that a tensor is of."""

    fqn: str
    home: int
    """Index on the pp axis of the rank that has it."""


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
        homes: FQN of a block -> index on the pp axis of the rank that has it.
    """

    def __init__(
        self, module: nn.Module, blocks: Mapping[str, nn.Module], homes: Mapping[str, int], exchange: Exchange
    ) -> None:
        self._exchange = exchange
        owners = [(_Owner(fqn=fqn, home=homes[fqn]), block) for fqn, block in blocks.items()]
        self._owners = {inner: owner for owner, block in owners for inner in block.modules()}
        self._parameters = {parameter: owner for owner, block in owners for parameter in block.parameters()}
        self._tied = {
            (inner, name): self._parameters[parameter]
            for inner in module.modules()
            for name, parameter in parameters_of(inner).items()
            if inner not in self._owners and parameter in self._parameters
        }
        self._read: dict[tuple[nn.Module, str], Tensor] = {}  # since a step began, or an optimizer stepped

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

        def shown(module: nn.Module, name: str) -> Any:
            value = read(module, name)
            owner = self._owner_of(module, name) if isinstance(value, Tensor) else None
            if owner is None or _is_given(module, name) or not is_in_glue():
                return value
            assert isinstance(value, Tensor)
            if (module, name) not in self._read:
                self._read[module, name] = self._exchange.read(value, owner.home)
            return self._read[module, name]

        def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            given = list(inputs) if isinstance(inputs, Sequence) else [inputs]
            owners = [self._owner(tensor) for tensor in given]
            if not is_in_glue() or not any(owners):
                return differentiate(outputs, inputs, *args, **kwargs)
            return self._gradients(differentiate, outputs, given, owners, *args, **kwargs)

        self.forget()
        getting = attributes_replaced(nn.Module, {"__getattr__": shown})
        with getting, attributes_replaced(torch.autograd, {"grad": grad}):
            try:
                yield
            finally:
                self.forget()

    def _owner(self, tensor: Any) -> _Owner | None:
        if isinstance(tensor, nn.Parameter) and tensor in self._parameters:
            return self._parameters[tensor]
        return next((self._owner_of(*slot) for slot, read in self._read.items() if read is tensor), None)

    def _owner_of(self, module: nn.Module, name: str) -> _Owner | None:
        return self._owners.get(module) or self._tied.get((module, name))

    def _gradients(
        self,
        differentiate: Callable[..., Any],
        outputs: Any,
        given: Sequence[Any],
        owners: Sequence[_Owner | None],
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        allow_unused: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor | None, ...]:
        if create_graph:
            raise StepError(
                f"torch.autograd.grad with respect to a weight of {next(o for o in owners if o is not None).fqn} was"
                " called with create_graph=True, but with a pipeline one rank has its graph. Use"
                " pipeline_parallel_size=1."
            )
        absent = {owner.fqn for owner in owners if owner is not None and owner.home != self._exchange.pp_rank}
        edges = [edge for fqn in absent for edge in self._exchange.edges.get(fqn, ())]
        inputs = [tensor for tensor in given if not (isinstance(tensor, Tensor) and tensor.is_meta)]
        found = differentiate(outputs, [*inputs, *edges], grad_outputs, retain_graph, allow_unused=True, **others)
        of_inputs = iter(found)
        results: list[Tensor | None] = []
        for tensor, owner in zip(given, owners, strict=True):
            own = None if isinstance(tensor, Tensor) and tensor.is_meta else next(of_inputs)
            results.append(own if owner is None else self._exchange.same(own, tensor, owner.home))
        if not allow_unused and any(result is None for result in results):
            raise RuntimeError("One of the differentiated tensors was not used in the graph: set allow_unused=True.")
        return tuple(results)
