"""The heads of a model whose logits are made lazily while steps run, and what each step was seen to do with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_3d.model.block_runner import BlockRunner, Call, runner_of
from lightning_3d.tensor.vocabulary.lazy_logits import HeadCall, lazy_logits
from lightning_3d.torch_internals.autograd import has_saved_tensor_hooks
from lightning_3d.torch_internals.modules import has_backward_hooks
from lightning_3d.trace.refusals import user_frame

PATIENCE = 2
"""Calls in a row whose logits are read, after which they are made at once; one of many may, as to log an accuracy."""


class FusedHead:
    """One head: a linear layer that is a block.

    Args:
        head: A block.
    """

    def __init__(self, fqn: str, head: nn.Linear) -> None:
        self.fqn, self._head = fqn, head
        self._num_read: dict[bool, int] = {}  # with gradients or without -> calls in a row
        self._reasons: dict[bool, str] = {}
        self._calls: list[HeadCall] = []
        self._is_absent = False
        self.is_known = False
        """Whether a training step has run."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Answer its calls inside."""
        runner = runner_of(self._head)
        self._is_absent = runner is not None and runner.is_absent
        reason = None if runner is None else self._never(runner)
        if reason is not None:
            self._reasons[True] = reason
        if runner is None or reason is not None:
            yield
            return
        runner.lazy = partial(self._call, runner.own_forward)
        try:
            yield
        finally:
            runner.lazy = None

    def _call(self, forward: Call, *args: Any, **kwargs: Any) -> Any:
        has_grad = torch.is_grad_enabled()
        if self._num_read.get(has_grad, 0) >= PATIENCE or len(args) != 1 or kwargs:
            return forward(*args, **kwargs)
        rows = args[0]
        if (reason := self._obstacle(rows)) is not None:
            self._reasons[has_grad] = reason
            return forward(rows)
        call = HeadCall(rows, self._head.weight, self._head.bias, partial(self._note, has_grad))
        self._calls.append(call)
        return lazy_logits(call)

    def _note(self, has_grad: bool, reader: str) -> None:
        self._reasons[has_grad] = f"the step reads logits: {reader} at {user_frame()}"

    def _never(self, runner: BlockRunner) -> str | None:
        """Why none of its calls can be answered."""
        if getattr(runner.own_forward, "__func__", None) is not nn.Linear.forward:
            return "its forward is not that of nn.Linear"
        if runner.is_wrapped:
            return "it is compiled or called through a wrapper"
        if isinstance(self._head, FSDPModule):
            return "its weight is gathered only while it runs (zero.stage=3)"
        if runner.recomputed is not None:
            return "its backward computes it again (activations.recompute)"
        if runner.sharded is not None:
            return "tensor parallel shards or runs it"
        return None

    def _obstacle(self, rows: Tensor) -> str | None:
        head = self._head
        if type(rows) is not Tensor or type(head.weight) is not nn.Parameter or head.weight.device != rows.device:
            return "its input or its weight is no plain tensor"
        if has_backward_hooks(head):
            return "it has backward hooks"
        if has_saved_tensor_hooks():
            return "it runs inside of a checkpoint or other hooks on saved tensors"
        is_cast = torch.is_autocast_enabled(rows.device.type) and rows.dtype != torch.float64
        if not rows.is_floating_point() or (rows.dtype != head.weight.dtype and not is_cast):
            return f"its input is {rows.dtype}, its weight {head.weight.dtype}"
        return None

    def end_step(self) -> None:
        """Count what the step's calls became."""
        for call in self._calls:
            call.end()
            self._num_read[call.has_grad] = 0 if call.made is None else self._num_read.get(call.has_grad, 0) + 1
            self.is_known |= call.has_grad
            if call.made is None:
                self._reasons.pop(call.has_grad, None)
        self._calls.clear()

    @property
    def text(self) -> str:
        """The outcome in training, for people."""
        if (reason := self._reasons.get(True)) is not None:
            return f"{self.fqn}: makes logits, as {reason}"
        if self._is_absent:
            return f"{self.fqn}: its pipeline stage fuses it with its cross entropy unless the step reads logits"
        if not self.is_known:
            return f"{self.fqn}: the first training step shows whether it is fused with its loss"
        return f"{self.fqn}: fused with its cross entropy, without logits"


class FusedHeads:
    """All heads on this rank.

    Args:
        blocks: FQN -> block.
        is_on: Whether to fuse at all.
    """

    def __init__(self, blocks: Mapping[str, nn.Module], *, is_on: bool) -> None:
        self._heads: list[FusedHead] = []
        for fqn, block in blocks.items() if is_on else ():
            if isinstance(block, nn.Linear) and block.out_features > block.in_features:
                self._heads.append(FusedHead(fqn, block))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Make logits lazily inside, where a step runs; what is still referred to at the end has its values."""
        with ExitStack() as off:
            for head in self._heads:
                off.enter_context(head.on())
            yield
            for head in self._heads:
                head.end_step()

    @property
    def texts(self) -> tuple[str, ...]:
        """A line for each, for people."""
        return tuple(head.text for head in self._heads)
