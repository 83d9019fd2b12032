"""Gradients of a block's inputs, in backwards on all ranks of a pipeline of which one has the block.

    where it is     inputs -> enter -> the block -> leave -> outputs
    elsewhere       inputs ----------> remote ------------> outputs

[Note: the order of messages]
Around the blocks every rank runs the same code on the same values. In a backward ``enter`` sends the gradients of the
inputs, and ``remote`` receives them. Autograd visits the nodes of a graph from the youngest to the oldest, as each was
made after those that it reads; those of one call of a block are made at the same place on all ranks, so that all come
to them in one order, if one thread makes them. A token that each output depends on lets ``enter`` run in every backward
that comes to an output, as ``remote`` does, also where no gradient flows through the block.

[Note: gradients of gradients]
With ``create_graph=True`` the backward is a call of the block, too: from the gradients of its outputs to those of its
inputs. So its own backward sends the gradients of the former, and those of the inputs come once more, by the nodes of
the forward, which tokens lead to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import StepError

About = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, dtype and device of a tensor."""

_NONE: About = (torch.Size(()), torch.float32, torch.device("cpu"))
"""Stands for a gradient that is not there."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """The connection of a call of a block.

    Attributes:
        fqn: The block.
        send: Sends gradients from the rank that has it, and returns them as the others get them.
        receive: Receives them.
    """

    fqn: str
    send: Callable[[Sequence[Tensor | None]], list[Tensor | None]]
    receive: Callable[[Sequence[About]], list[Tensor | None]]


def enter(line: Line, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A token, and the inputs for the block."""
    entered: tuple[Tensor, ...] = _Enter.apply(line, *inputs)  # type: ignore[no-untyped-call]  # torch 2.13
    return entered


def leave(line: Line, token: Tensor, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of the block, which depend on the token."""
    left: tuple[Tensor, ...] = _Leave.apply(line, token, *outputs)  # type: ignore[no-untyped-call]
    return left


def remote(
    line: Line,
    values: Callable[[], tuple[Tensor, ...]],
    are_trained: Sequence[bool],
    anchor: Tensor,
    inputs: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """The outputs of a block that is elsewhere.

    Args:
        values: Receives them.
        are_trained: Which of them require gradients.
        anchor: Requires a gradient, so that they can where no input does.
    """
    _, *outputs = _Remote.apply(line, values, are_trained, anchor, *inputs)  # type: ignore[no-untyped-call]
    return tuple(outputs)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.line = line
        token = inputs[0].new_zeros(())
        ctx.save_for_backward(token)
        return (token, *(tensor.detach() for tensor in inputs))  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        if not torch.is_grad_enabled():
            return (None, *ctx.line.send(gradients))
        return (None, *_SentGradients.apply(ctx.line, *ctx.saved_tensors, of_token, *gradients))  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, line: Line, token: Tensor, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.line, ctx.token = line, (token.dtype, token.device)
        return tuple(tensor.detach() for tensor in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        dtype, device = ctx.token
        of_token = torch.zeros((), dtype=dtype, device=device)
        if not torch.is_grad_enabled():
            return (None, of_token, *gradients)
        of_token.requires_grad_()  # so that there is a node on all ranks, where the gradients have no graph, too
        return (None, *_EnteredGradients.apply(ctx.line, of_token, *gradients))  # type: ignore[no-untyped-call]


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        line: Line,
        values: Callable[[], tuple[Tensor, ...]],
        are_trained: Sequence[bool],
        anchor: Tensor,
        *inputs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.line, ctx.inputs = line, [(tensor.shape, tensor.dtype, tensor.device) for tensor in inputs]
        token, outputs = anchor.new_zeros(()), values()
        pairs = zip(outputs, are_trained, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, is_trained in pairs if not is_trained))
        ctx.save_for_backward(token)
        return (token, *outputs)

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        received: Any = []
        if ctx.inputs and not torch.is_grad_enabled():
            received = ctx.line.receive(ctx.inputs)
        elif ctx.inputs:
            received = _RemoteGradients.apply(ctx.line, ctx.inputs, *ctx.saved_tensors, *gradients)  # type: ignore[no-untyped-call]
        return (None, None, None, None, *received)


class _EnteredGradients(torch.autograd.Function):
    """Where the block is: gradients of its outputs, before its backward, which is differentiated."""

    @staticmethod
    def forward(ctx: Any, line: Line, token: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.line = line
        return (token.clone(), *(None if gradient is None else gradient.detach() for gradient in gradients))

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> tuple[Any, ...]:
        _refuse_third(ctx.line)
        return (None, None, *ctx.line.send(gradients))


class _SentGradients(torch.autograd.Function):
    """Where the block is: gradients of its inputs, after its backward."""

    @staticmethod
    def forward(
        ctx: Any, line: Line, token: Tensor, of_token: Tensor | None, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.line, ctx.tokens = line, (token.new_zeros(()), None if of_token is None else of_token.new_zeros(()))
        return tuple(None if gradient is None else gradient.detach() for gradient in line.send(gradients))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        _refuse_third(ctx.line)
        return (None, *ctx.tokens, *gradients)


class _RemoteGradients(torch.autograd.Function):
    """Elsewhere: from the gradients of the outputs to those of the inputs."""

    @staticmethod
    def forward(
        ctx: Any, line: Line, inputs: Sequence[About], token: Tensor, *gradients: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.line, ctx.token = line, token.new_zeros(())
        ctx.about = [_NONE if g is None else (g.shape, g.dtype, g.device) for g in gradients]
        return tuple(line.receive(inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        _refuse_third(ctx.line)
        return (None, None, ctx.token, *ctx.line.receive(ctx.about))


def _refuse_third(line: Line) -> None:
    if torch.is_grad_enabled():
        raise StepError(
            f"A gradient of a gradient through {line.fqn} was taken with create_graph=True, but with a pipeline ranks"
            " keep the graphs of gradients no further. Use pipeline_parallel_size=1."
        )
