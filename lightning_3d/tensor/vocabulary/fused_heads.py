"""The heads of a model whose logits are made lazily while steps run, and what each step was seen to do with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_3d.model.block_runner import AnyCallable, BlockRunner, runner_of
from lightning_3d.sharding.axis import MeshAxis
from lightning_3d.sharding.collectives import redistribute
from lightning_3d.sharding.gradient_factor import with_gradient_times
from lightning_3d.sharding.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, lengths_of
from lightning_3d.sharding.sharded_tensor import ShardedTensor, placement_of
from lightning_3d.tensor.own_shard import own_shard
from lightning_3d.tensor.plan.block_plan import BlockTensorPlan
from lightning_3d.tensor.vocabulary.head_call import Compute, HeadCall, Through
from lightning_3d.tensor.vocabulary.head_record import HeadRecord
from lightning_3d.tensor.vocabulary.lazy_tensor import LazyTensor, made
from lightning_3d.tensor.vocabulary.sharded_classes import ShardedClasses
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks
from lightning_3d.torch_internals.custom_functions import custom_functions_seen
from lightning_3d.torch_internals.dispatch import DisableTorchFunction
from lightning_3d.torch_internals.modules import has_backward_hooks
from lightning_3d.torch_internals.pytree import tree_map
from lightning_3d.torch_internals.tensors import are_transforms_active
from lightning_3d.trace.side_outputs import has_user_hooks, hooks_noted
from lightning_3d.zero.gathering import wait_for


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadPlan:
    """The plan of a head, on whatever rank it is."""

    tensor: BlockTensorPlan | None = None
    is_recomputed: bool = False
    is_offloaded: bool = False

    @property
    def is_sharded(self) -> bool:
        """Whether tensor parallel runs it on shards."""
        return self.tensor is not None and self.tensor.is_sharded

    @property
    def reason(self) -> str | None:
        """Why it is never fused with its loss."""
        if self.is_recomputed:
            return "its backward computes it again (activations.recompute)"
        if self.is_offloaded:
            return "what it keeps is offloaded (activations.offload)"
        if self.tensor is None or not self.tensor.is_sharded:
            return None
        if self.tensor.weight("weight").role != "vocabulary":
            return "tensor parallel shards it, but not for a loss on shards of its classes"
        if self.tensor.gathers_logits:
            return "the step, as traced, reads logits or does not show that it never does"
        return None


def is_head(block: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a block makes more than it reads, as a linear layer of logits does."""
    return isinstance(block, nn.Linear) and block.out_features > block.in_features


class FusedHead:
    """One head: a linear layer that is a block.

    Args:
        head: A block.
        plan: Of the whole model, as all ranks have it.
        tp: The tp axis; None if it has one rank.
        meet: Called where logits are made that this axis has among it, with what for.
    """

    def __init__(
        self, fqn: str, head: nn.Linear, plan: HeadPlan, tp: MeshAxis | None, meet: Callable[[str], None]
    ) -> None:
        self.fqn, self._head, self._plan, self._redistribute = fqn, head, plan, meet
        self._tp = tp if plan.is_sharded else None
        self.record = HeadRecord()
        self._is_absent = False

    @contextmanager
    def on(self) -> Iterator[None]:
        """Answer its calls inside."""
        runner = runner_of(self._head)
        self._is_absent = runner is not None and runner.is_absent
        reason = None if runner is None else self._never(runner)
        if reason is not None:
            self.record.refuse(reason, has_grad=True)
        if runner is None or reason is not None:
            yield
            return
        if self.is_deferred:
            runner.deferred = partial(self._deferred, runner)
        else:
            runner.lazy = partial(self._call, runner.own_forward)
        try:
            yield
        finally:
            runner.lazy = runner.deferred = None

    @property
    def is_deferred(self) -> bool:
        """Whether its weight is gathered only where its logits are made, or their loss."""
        return isinstance(self._head, FSDPModule)

    def _call(self, forward: AnyCallable, *args: object, **kwargs: object) -> Any:
        wait_for(self._head.parameters())
        given = self._rows(args, kwargs)
        if given is None:
            return forward(*args, **kwargs)
        rows, weight, bias = self._own(_slice_of(given))
        return _as_given(given, self._lazily(rows, _read_by(given, weight), _read_by(given, bias)))

    def _deferred(
        self, runner: BlockRunner, call: AnyCallable, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AnyCallable | None:
        """Answer a call whose hooks gather the weight: they run when logits are made, or their loss in their place."""
        if (given := self._rows(args, kwargs)) is None:
            return None

        def through(rows: Tensor, compute: Compute) -> Tensor:
            def run(forward: AnyCallable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
                own, weight, bias = self._own(args[0])
                return compute(own, _read_by(given, weight), _read_by(given, bias))

            with hooks_noted(self._head, frozenset()):  # the step calls them
                made: Tensor = runner.call_late(call, run, rows)
            return made

        return lambda *args, **kwargs: _as_given(given, self._lazily(_slice_of(given), None, None, through))

    def _rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """The input of the head in a call that can be answered; None if it can't."""
        given = [*args, *(value for name, value in kwargs.items() if name == "input")]
        if self.record.is_read or len(given) != 1 or len(args) + len(kwargs) != 1:
            return None
        rows: Tensor = given[0]
        if (reason := self._obstacle(rows)) is not None:
            self.record.refuse(reason, has_grad=torch.is_grad_enabled())
            return None
        return rows

    def _own(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's part: rows, weight and bias."""
        weight, bias = self._head.weight, self._head.bias
        if self._tp is None:
            return rows, weight, bias
        assert isinstance(weight, DTensor)
        return (
            redistribute(rows, self._tp, REPLICATE, REPLICATE_PARTIAL_GRAD),
            own_shard(weight),
            own_shard(bias) if isinstance(bias, DTensor) else None,
        )

    def _lazily(
        self, rows: Tensor, weight: Tensor | None, bias: Tensor | None, through: Through | None = None
    ) -> Tensor:
        num_classes = self._head.weight.shape[0]
        classes = None if self._tp is None else ShardedClasses(num_classes, self._tp)
        parts = [tensor for tensor in (self._head.weight, self._head.bias) if isinstance(tensor, DTensor)]
        on_read = partial(self._note_read, torch.is_grad_enabled())
        call = HeadCall(rows, weight, bias, on_read, classes, num_classes=num_classes, through=through, aliases=parts)
        return self.record.lazily(call)

    def _note_read(self, has_grad: bool, reader: str) -> None:
        self.record.note_read(has_grad, reader)
        if self._tp is not None:
            self._redistribute(f"a read of the logits of {self.fqn} by {reader}")

    def _never(self, runner: BlockRunner) -> str | None:
        """Why none of its calls can be answered."""
        if getattr(runner.own_forward, "__func__", None) is not nn.Linear.forward:
            return "its forward is not that of nn.Linear"
        if runner.is_wrapped:
            return "it is compiled or called through a wrapper"
        return self._plan.reason

    def _obstacle(self, rows: Tensor) -> str | None:
        head, is_unit = self._head, self.is_deferred
        if is_unit and torch.compiler.is_compiling():  # which reads the shard of the weight
            return "it is called by compiled code, and its weight is gathered only while it runs (zero.stage=3)"
        if is_unit or self._tp is not None:
            is_expected = isinstance(head.weight, DTensor)
        else:
            is_expected = type(head.weight) is nn.Parameter
        is_plain = type(rows) is Tensor or (self._tp is None and _has_rows_everywhere(rows))
        if not is_plain or not is_expected or not (is_unit or head.weight.device == rows.device):
            return "its input or its weight is no plain tensor"
        if has_backward_hooks(head):
            return "it has backward hooks"
        if is_unit and has_user_hooks(head):
            return "it has hooks, and its weight is gathered only while it runs (zero.stage=3)"
        if has_saved_tensor_hooks():
            return "it runs inside of a checkpoint or other hooks on saved tensors"
        if are_transforms_active():
            return "it runs inside of a transform of torch.func"
        is_cast = torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64
        if not rows.is_floating_point() or (rows.dtype != head.weight.dtype and not is_cast):
            return f"its input is {rows.dtype}, its weight {head.weight.dtype}"
        return None

    @property
    def text(self) -> str:
        """The outcome in training, for people."""
        return f"{self.fqn}: {self.record.text(is_absent=self._is_absent)}"


def _has_rows_everywhere(rows: Tensor) -> bool:
    """Whether every rank of an axis has some of the rows, and the features of each."""
    at = placement_of(rows)
    return at is not None and at.dim < rows.dim() - 1 and rows.numel() > 0 and min(lengths_of(at) or (1,)) > 0


def _slice_of(rows: Tensor) -> Tensor:
    with DisableTorchFunction():  # the interpreter of slices runs
        return rows.own() if isinstance(rows, ShardedTensor) else rows


def _read_by(rows: Tensor, weight: Tensor | None) -> Tensor | None:
    """A weight as rows read it: with slices of rows, ranks count as its replicas."""
    if weight is None or not isinstance(rows, ShardedTensor):
        return weight
    return with_gradient_times(weight, rows.axis.size)


def _as_given(rows: Tensor, logits: Tensor) -> Tensor:
    """Logits that lie as the rows do."""
    with DisableTorchFunction():
        return ShardedTensor(logits, rows.axis, rows.placement) if isinstance(rows, ShardedTensor) else logits


def _on_plain_logits(
    cls: type[torch.autograd.Function], call: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """Answer a custom autograd function, whose backward could not reach a weight that is gone by then."""
    if not cls.__module__.startswith("lightning_3d."):
        args, kwargs = tree_map(partial(made, reader=cls.__name__), (args, kwargs))
    return call(*args, **kwargs)


class FusedHeads:
    """All heads on this rank.

    Args:
        blocks: FQN -> block, and what is planned of it.
        tp: The tp axis; None if it has one rank.
        meet: Called where logits are made that this axis has among it, with what for.
    """

    def __init__(
        self,
        blocks: Mapping[str, tuple[nn.Module, HeadPlan]],
        tp: MeshAxis | None,
        meet: Callable[[str], None] = lambda what: None,
    ) -> None:
        heads = ((fqn, head, plan) for fqn, (head, plan) in blocks.items() if is_head(head))
        self._heads = [FusedHead(fqn, head, plan, tp, meet) for fqn, head, plan in heads]

    @contextmanager
    def on(self) -> Iterator[None]:
        """Make logits lazily inside, where a step runs; what is still referred to at the end has its values."""
        with ExitStack() as off:
            for head in self._heads:
                off.enter_context(head.on())
            if any(head.is_deferred for head in self._heads):
                off.enter_context(custom_functions_seen(_on_plain_logits))
            with _hint_for_compiled_code():
                yield
            for head in self._heads:
                head.record.end_step()

    @property
    def texts(self) -> tuple[str, ...]:
        """A line for each, for people."""
        return tuple(head.text for head in self._heads)


@contextmanager
def _hint_for_compiled_code() -> Iterator[None]:
    """Errors of Dynamo about lazy logits name the setting that helps."""
    try:
        yield
    except Exception as error:
        if type(error).__module__ == "torch._dynamo.exc" and LazyTensor.__name__ in str(error):
            error.add_note(
                "LazyTensor is the output of a linear layer that may be a head, which runs with its loss; code under"
                " torch.compile leaves its graph for it. Set activations.fused_loss='never' for fullgraph=True."
            )
        raise
