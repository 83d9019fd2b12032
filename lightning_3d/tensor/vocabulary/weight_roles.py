"""Sharding over the vocabulary: the weights of a block that it suits, with their roles, and the calls that use them.

An embedding table and the weight of an output head are cut along their rows, tied or not, into as many rows per rank as
DTensor gives it, which need not be equal. Looking up ends in an all-reduce (`embedding`); a head's logits
leave the block on shards (`lazy_tensor`). The rest of the block is planned and run as if these weights were
replicated, as what comes of them is a full tensor to it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.collectives import bytes_sent, redistribute
from lightning_3d.sharding.interpret import Interpreter
from lightning_3d.sharding.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Shard, chunked
from lightning_3d.sharding.rules.function import Function
from lightning_3d.sharding.rules.projection import as_projection
from lightning_3d.sharding.sealed_tensor import SealedTensor
from lightning_3d.tensor.own_shard import own_shard
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan, Collective, Role
from lightning_3d.tensor.plan.record import RecordedCall, record_block
from lightning_3d.tensor.plan.weights import named_parameters
from lightning_3d.tensor.vocabulary.embedding import as_embedding, look_up
from lightning_3d.tensor.vocabulary.head_call import HeadCall
from lightning_3d.tensor.vocabulary.lazy_tensor import lazy_logits
from lightning_3d.tensor.vocabulary.sharded_classes import ShardedClasses
from lightning_3d.torch_internals.autocast import as_autocast
from lightning_3d.torch_internals.modules import parameters_of
from lightning_3d.trace.output_uses import ShardedLogits

Slot = tuple[nn.Module, str]
"""Where a parameter hangs: the module that owns it, and its name there."""


_LEAST_SHARE = 0.03
"""Least share of a block's parameters for which sharding a table is worth the all-reduce of its rows."""


@dataclass(kw_only=True, slots=True)
class WeightRoles:
    """The uses of one parameter in a forward: rows are looked up in it, logits are made with it, or both."""

    lookup_bytes: list[int] = field(default_factory=list)
    """Bytes of the rows that are looked up, by lookup."""

    head_input_bytes: list[int] = field(default_factory=list)
    """Bytes of inputs that it is multiplied with as a head, where they need a gradient."""

    logits: list[Tensor] = field(default_factory=list)
    """The fake logits that it makes as a head."""

    biases: tuple[str, ...] = ()
    """FQNs of the biases that go with it as a head."""

    num_others: int = 0
    """Other uses."""

    @property
    def is_vocabulary(self) -> bool:
        """Whether all of its uses can run on shards of its rows."""
        return len(self.lookup_bytes) + len(self.logits) > 0 and self.num_others == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyRoles:
    """The weights of a block that can be sharded over the vocabulary, and their roles."""

    weights: Mapping[str, WeightRoles] = field(default_factory=dict)
    """By FQN, ties under every name."""

    biases: Mapping[str, str] = field(default_factory=dict)
    """FQN of a head's bias -> FQN of its weight."""

    gathers_logits: bool = False

    def without(self, fqns: Collection[str]) -> VocabularyRoles:
        """The same without these weights and biases, and without what goes with them."""
        dropped = {*fqns, *(weight for bias, weight in self.biases.items() if bias in fqns)}
        return replace(
            self,
            weights={fqn: use for fqn, use in self.weights.items() if fqn not in dropped},
            biases={fqn: weight for fqn, weight in self.biases.items() if weight not in dropped},
        )

    @property
    def fqns(self) -> frozenset[str]:
        """FQNs of all weights and biases that are sharded."""
        return frozenset(self.weights) | frozenset(self.biases)


def find_vocabulary(
    block: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    *,
    size: int,
    logits: ShardedLogits | None,
    excluded: Collection[nn.Parameter] = frozenset(),
    by_hand: Mapping[str, Role] = MappingProxyType({}),
) -> VocabularyRoles:
    """Find the tables and heads among a block's weights by running its forward on fake tensors.

    A weight that is small beside the others (fewer rows than columns, or little of its block, as relative positions) is
    left out, unless a rule by hand asks for it.

    Takes what `plan_block` takes, and:

    Args:
        logits: The output that goes to a loss that runs on shards; None if there is none.
    """
    parameters = named_parameters(block)
    try:
        seen = _roles(block, args, kwargs, logits)
    except Exception:  # the block's own code on fake tensors can raise anything; `plan_block` says so
        return VocabularyRoles()

    least = _LEAST_SHARE * sum(parameter.numel() for parameter in block.parameters())

    def suits(fqn: str) -> bool:
        weight, use = parameters[fqn], seen[fqn]
        known = [parameters[name] for name in use.biases if not seen[name].num_others]
        return (
            by_hand.get(fqn, "vocabulary") == "vocabulary"
            and use.is_vocabulary
            and len(known) == len(use.biases)
            and not any(tensor is other for tensor in (weight, *known) for other in excluded)
            and _can_cut(weight, size)
            and (fqn in by_hand or (weight.shape[0] >= weight.shape[1] and weight.numel() >= least))
        )

    chosen = [fqn for fqn in parameters if suits(fqn)]
    return VocabularyRoles(
        weights={fqn: seen[fqn] for fqn in chosen},
        biases={bias: fqn for fqn in chosen for bias in seen[fqn].biases},
        gathers_logits=logits is not None and logits.is_read,
    )


def _roles(
    block: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], logits: ShardedLogits | None
) -> Mapping[str, WeightRoles]:
    """Run the block; FQN -> roles, tied weights alike."""
    record = record_block(block, args, kwargs)
    fqns: dict[int, tuple[str, ...]] = {}
    for fqn, fake in record.parameters.items():
        fqns[id(fake)] = (*fqns.get(id(fake), ()), fqn)
    uses = {i: WeightRoles() for i in fqns}
    for recorded in record.calls:
        used = uses.keys() & recorded.operands
        if used and recorded.results:  # else it asked for a shape or the like
            _note(recorded, used, uses, fqns, logits)
    returned = {id(leaf) for leaf in record.outputs}
    for use in uses.values():
        use.num_others += any(id(made) not in returned for made in use.logits)
    return {fqn: uses[id(fake)] for fqn, fake in record.parameters.items()}


def _note(
    recorded: RecordedCall,
    used: set[int],
    uses: Mapping[int, WeightRoles],
    fqns: Mapping[int, tuple[str, ...]],
    logits: ShardedLogits | None,
) -> None:
    """Note how a call uses parameters, which are known by their ids."""
    call = recorded.call
    embedding = as_embedding(call.function, call.args, call.kwargs)
    if embedding is not None and id(embedding.weight) in used:
        uses[id(embedding.weight)].lookup_bytes.append(recorded.output.nbytes)
        used.discard(id(embedding.weight))
    projection = as_projection(call) if call.function is F.linear else None
    if projection is not None and logits is not None and projection.weight.shape[0] == logits.num_classes:
        weight, bias = id(projection.weight), projection.bias
        if weight in used and (bias is None or id(bias) in used):
            use = uses[weight]
            use.logits.append(recorded.output)
            if projection.input.requires_grad:
                use.head_input_bytes.append(projection.input.nbytes)
            use.biases = use.biases if bias is None else (*use.biases, *fqns[id(bias)])
            used.difference_update({weight, id(bias)})
    for i in used:
        uses[i].num_others += 1


def with_vocabulary(plan: BlockTensorPlan, use: VocabularyRoles) -> BlockTensorPlan:
    """A plan that replicates these weights, changed to shard them over the vocabulary."""
    if not use.fqns:
        return plan
    uses = {id(weight): weight for weight in use.weights.values()}.values()  # a tied weight once
    return replace(
        plan,
        weights=tuple(
            replace(weight, role="vocabulary", sharding=Shard(0), reason=None) if weight.fqn in use.fqns else weight
            for weight in plan.weights
        ),
        collectives=(
            *plan.collectives,
            *(collective for weight in uses for collective in _collectives(weight, use, plan.size)),
        ),
        gathers_logits=use.gathers_logits and any(weight.logits for weight in uses),
        reason=None,
    )


def _collectives(weight: WeightRoles, use: VocabularyRoles, size: int) -> Iterator[Collective]:
    of = partial(Collective.of_full, size=size)
    for num_bytes in weight.lookup_bytes:
        yield of("all-reduce", num_bytes, "embedding")
    for num_bytes in weight.head_input_bytes:
        yield of("all-reduce", num_bytes, "linear", is_backward=True)
    for logits in weight.logits if use.gathers_logits else ():
        at = chunked(logits.dim() - 1, logits.shape[-1], size)
        num_bytes = bytes_sent(logits.shape, logits.itemsize, at, REPLICATE, size)
        yield Collective(kind="all-gather", num_bytes=num_bytes, call="linear")


def _can_cut(weight: Tensor, size: int) -> bool:
    """Whether every rank gets rows."""
    return weight.dim() == 2 and -(-weight.shape[0] // size) * (size - 1) < weight.shape[0]


# ------------------------------------------------------------------------------------------------------ execution


class VocabularyCalls(TorchFunctionMode):
    """Answers the calls that use weights sharded over the vocabulary; active during one forward of one block.

    Args:
        interpreter: Answers the block's other calls.
        slots: Where these weights hang; their biases, too.
        gathers_logits: Whether the step reads logits otherwise than by its loss.
    """

    def __init__(self, interpreter: Interpreter, slots: Sequence[Slot], *, gathers_logits: bool) -> None:
        super().__init__()
        assert isinstance(interpreter.axis, MeshAxis)
        self._interpreter, self._axis, self._gathers_logits = interpreter, interpreter.axis, gathers_logits
        self._weights = [parameters_of(owner)[name] for owner, name in slots]

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        embedding = as_embedding(func, args, kwargs)
        if embedding is not None and self._holds(embedding.weight):
            return look_up(embedding, self._axis)
        if func is F.linear and self._holds(args[1] if len(args) > 1 else kwargs["weight"]):
            return self._logits(*args, **kwargs)
        return func(*args, **kwargs)

    def _holds(self, weight: Tensor) -> bool:
        return any(weight is known for known in self._weights)

    def _logits(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert isinstance(weight, DTensor)
        whole = self._interpreter.whole(input)
        entered = redistribute(whole, self._axis, REPLICATE, REPLICATE_PARTIAL_GRAD)
        own_bias = own_shard(bias) if isinstance(bias, DTensor) else None
        local = F.linear(entered, as_autocast(own_shard(weight)), own_bias)
        classes = ShardedClasses(weight.shape[0], self._axis)
        if self._gathers_logits or isinstance(local, SealedTensor):  # the loss is computed on slices of sequences
            return classes.gathered(local)
        return lazy_logits(HeadCall(local, None, None, classes=classes, num_classes=classes.num))
