"""Uses of sharded weights on fake tensors: what `weight_calls` does on shards, with the ledger's placements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Partial, Replicate, Shard

from lightning_3d.errors import PlanError
from lightning_3d.tensor.parts import Parts
from lightning_3d.tensor.plan.ledger import Ledger
from lightning_3d.tensor.plan.weights import Weights
from lightning_3d.tensor.rules.contraction import Contraction, as_contraction
from lightning_3d.tensor.rules.convolution import Convolution, as_convolution
from lightning_3d.tensor.rules.experts_matmul import without_data
from lightning_3d.tensor.rules.function import Function, destination, tensors_in
from lightning_3d.tensor.rules.grouped import reads_metadata
from lightning_3d.tensor.rules.projection import Projection, as_projection
from lightning_3d.tensor.rules.sequence import SEQUENCE_DIM, is_along
from lightning_3d.tensor.run.partial_sums import keeps_partial
from lightning_3d.torch_internals.tensors import version_of

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class FollowedUses:
    """For one run of one block.

    Args:
        weights: Decides each weight at its first use.
        ledger: Gets the placements of results and the communication.
        sequence: Full shape (B, T, D) of the block's input that is cut along its sequence; None if none is.
        defers_sums: Whether what row weights of experts give is reduced later (`partial_sums`).
    """

    def __init__(
        self, weights: Weights, ledger: Ledger, sequence: torch.Size | None, *, defers_sums: bool = False
    ) -> None:
        self.output_bytes: dict[str, int] = {}
        """FQN of a column or row weight -> bytes of the full outputs of its uses."""
        self._weights, self._ledger, self._sequence = weights, ledger, sequence
        self._sums = _DeferredSums(ledger) if defers_sums else None
        # What column weights read, by id and version: the activation, and whether it is a slice of the sequence.
        self._column_inputs: dict[tuple[int, int], tuple[Tensor, bool]] = {}

    @property
    def num_column_inputs(self) -> int:
        """Distinct replicated activations that enter column weights."""
        return sum(not is_sliced for _, is_sliced in self._column_inputs.values())

    def follow(self, func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
        """The result of a call if it is a use of a weight that is sharded, perhaps just now; else None."""
        if self._sums is not None and not reads_metadata(func):
            changed = destination(func, args, kwargs)
            if changed is not None and self._sums.has_known(changed):
                raise PlanError(f"{name} changes a sum in place that may not have been made yet")
            if self._sums.keep(func, args, kwargs):
                return self._on_parts_of_sum(func, name, args, kwargs)
            self.reduce_sums((args, kwargs), name)
        projection = as_projection(func, args, kwargs)
        if projection is not None and self._weights.decide(projection) and self._is_along(projection):
            return self._project(func, name, args, kwargs, projection)
        if (made := self._weights.make_aliases(func, args, kwargs)) is not None:
            return made
        contraction = as_contraction(func, args, kwargs, self._weights.is_weight)
        if contraction is not None and self._weights.decide_contraction(contraction):
            return self._contract(func, name, args, kwargs, contraction)
        convolution = as_convolution(func, args, kwargs)
        return None if convolution is None else self._convolve(func, name, convolution)

    def _is_along(self, call: Projection) -> bool:
        """Whether the parts of the weight, if it has any, are its output features."""
        parts = self._ledger.parts(call.weight)
        return parts is None or parts.dim == call.features_dim

    def _project(self, func: Function, name: str, args: Args, kwargs: Kwargs, call: Projection) -> Any:
        """``input @ weight + bias`` with a sharded weight."""
        ledger, fqn = self._ledger, self._weights.fqn_of(call.weight)
        with ledger.closed():
            output = func(*args, **kwargs)
        self._weights.settle(name, [] if call.bias is None else [call.bias], output)
        self.output_bytes[fqn] = self.output_bytes.get(fqn, 0) + output.numel() * output.element_size()
        parts = ledger.parts(call.weight)
        if parts is not None or ledger.dim(call.weight) == call.features_dim:
            is_sliced = is_along(call.input, self._sequence) and ledger.dim(call.input) == SEQUENCE_DIM
            read = (id(call.input), version_of(call.input))
            if not is_sliced or read not in self._column_inputs:
                ledger.gather(call.input, name)
            self._column_inputs[read] = (call.input, is_sliced)
            sizes = (output.shape[-1],) if parts is None else parts.sizes
            made = Parts(dim=output.dim() - 1, sizes=sizes, num_ranks=ledger.size)
            ledger.put_parts(output, made, frozenset({fqn}), ledger.start(call.weight))
        else:
            if ledger.dim(call.input) != call.input.dim() - 1:
                ledger.gather(call.input, name)
            sources, is_sliced = ledger.sources([call.input]), is_along(output, self._sequence)
            target = Shard(SEQUENCE_DIM) if is_sliced else Replicate()
            ledger.move(output, Partial(), target, sources, name, row=fqn)
            ledger.put(output, target, frozenset())
        return output

    def _contract(self, func: Function, name: str, args: Args, kwargs: Kwargs, call: Contraction) -> Any:
        """As `_project`, for a contraction with a sharded weight."""
        ledger, fqn, parts = self._ledger, self._weights.fqn_of(call.weight), self._ledger.parts(call.weight)
        dim = ledger.dim(call.weight) if parts is None else parts.dim
        assert dim is not None
        letter = call.of_weight[dim]
        if letter in call.features:
            ledger.gather(call.input, name)
            self._column_inputs[id(call.input), version_of(call.input)] = (call.input, False)
        elif ledger.dim(call.input) != call.of_input.index(letter):
            ledger.gather(call.input, name)
        with ledger.closed():
            output = without_data(func)(*args, **kwargs)
        self._weights.settle(name, [call.input], output)
        self.output_bytes[fqn] = self.output_bytes.get(fqn, 0) + output.numel() * output.element_size()
        if letter in call.features:
            along = call.of_output.index(letter)
            sizes = (output.shape[along],) if parts is None else parts.sizes
            made = Parts(dim=along, sizes=sizes, num_ranks=ledger.size)
            ledger.put_parts(output, made, frozenset({fqn}), ledger.start(call.weight))
        elif self._sums is not None and call.is_stacked:
            self._sums.put(output, fqn, ledger.sources([call.input]))
        else:
            ledger.move(output, Partial(), Replicate(), ledger.sources([call.input]), name, row=fqn)
        return output

    def reduce_sums(self, tensors: Any, name: str) -> None:
        """Count the reductions of sums that were deferred until a call, or to the end of the block."""
        if self._sums is not None:
            self._sums.reduce(tensors, name)

    def was_deferred(self, tensor: Tensor) -> bool:
        """Whether a tensor is a deferred sum, or was one."""
        return self._sums is not None and self._sums.has_known(tensor)

    def _on_parts_of_sum(self, func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
        """A call that every rank makes on its part of a deferred sum."""
        assert self._sums is not None
        with self._ledger.closed():
            output = func(*args, **kwargs)
        others = [tensor for tensor in tensors_in((args, kwargs)) if not self._sums.is_deferred(tensor)]
        self._weights.settle(name, others, output)
        for tensor in others:
            if tensor.is_floating_point():
                self._column_inputs[id(tensor), version_of(tensor)] = (tensor, False)
        self._sums.derive(output, (args, kwargs))
        return output

    def _convolve(self, func: Function, name: str, call: Convolution) -> Tensor:
        """A convolution with any weight."""
        self._weights.decide(call)
        ledger, fqn, dim = self._ledger, self._weights.fqn_of(call.weight), call.input_dim
        parts, sources = ledger.parts(call.weight), ledger.sources([call.input])
        weight_dim = ledger.dim(call.weight) if parts is None else parts.dim
        form = call.form(weight_dim, has_parts=parts is not None, size=ledger.size)
        along = None if parts is None else replace(parts, dim=dim)
        is_own = ledger.dim(call.input) == dim if along is None else ledger.parts(call.input) == along
        if form in ("column", "whole") or not is_own:
            ledger.gather(call.input, name)
        with ledger.closed():
            output = call.run(call.input, call.weight, call.bias, call.groups)
        self._weights.settle(name, tensors_in((call.input, call.bias)), output)
        self.output_bytes[fqn] = self.output_bytes.get(fqn, 0) + output.numel() * output.element_size()
        made = along or Parts(dim=dim, sizes=(output.shape[dim],), num_ranks=ledger.size)
        match form:
            case "column":
                self._column_inputs[id(call.input), version_of(call.input)] = (call.input, False)
                ledger.put_parts(output, made, frozenset({fqn}), ledger.start(call.weight))
            case "groups":
                ledger.put_parts(output, made, sources | {fqn}, ledger.start(call.input))
            case "row":
                ledger.move(output, Partial(), Replicate(), sources, name, row=fqn)
            case "whole":
                ledger.gather(call.weight, name)
        return output


class _DeferredSums:
    """Sums over ranks that are not made yet."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # By id: the tensor, so that no id is used twice; the row weight; the column weights that its input comes from.
        self._deferred: dict[int, tuple[Tensor, str, frozenset[str]]] = {}
        self._known: dict[int, Tensor] = {}

    def put(self, tensor: Tensor, row: str, sources: frozenset[str]) -> None:
        self._deferred[id(tensor)] = (tensor, row, sources)
        self._known[id(tensor)] = tensor

    def is_deferred(self, tensor: Tensor) -> bool:
        return id(tensor) in self._deferred

    def has_known(self, tensor: Tensor) -> bool:
        return id(tensor) in self._known

    def keep(self, function: Function, args: Args, kwargs: Kwargs) -> bool:
        """Whether the result of a call is deferred like its argument."""
        return keeps_partial(function, args, kwargs, self.is_deferred, self._is_plain)

    def _is_plain(self, tensor: Tensor) -> bool:
        return not self.is_deferred(tensor) and self._ledger.entry(tensor) is None

    def derive(self, results: Any, arguments: Any) -> None:
        """Results of a call on a deferred sum are deferred, too."""
        _, row, sources = next(self._deferred[id(t)] for t in tensors_in(arguments) if self.is_deferred(t))
        for tensor in tensors_in(results):
            self.put(tensor, row, sources)

    def reduce(self, tensors: Any, name: str) -> None:
        """Count the reduction of each deferred sum among tensors."""
        for tensor in tensors_in(tensors):
            if (deferred := self._deferred.pop(id(tensor), None)) is not None:
                self._ledger.move(tensor, Partial(), Replicate(), deferred[2], name, row=deferred[1])
