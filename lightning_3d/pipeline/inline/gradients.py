"""Gradients of a block's inputs, in backwards on all ranks of a pipeline of which one has the block.

    where it is     inputs -> enter -> the block -> leave -> outputs
    elsewhere       inputs ----------> remote ------------> outputs

[Note: the order of messages]
Around the blocks every rank runs the same code on the same values. In a backward ``enter`` sends the gradients of the
inputs, and ``remote`` receives them. Autograd visits the nodes of a graph from the youngest to the oldest, as each was
made after those that it reads; those of one call of a block are made at the same place on all ranks, so that all come
to them in one order, if one thread makes them. A token goes from ``enter`` to ``leave``, so that both run in every
backward that comes to an output, as ``remote`` does, also where no gradient flows through the block.

[Note: gradients of gradients]
With ``create_graph=True`` the backward is a call of the block, too: from the gradients of its outputs to those of its
inputs. So its own backward sends the gradients of the former, and those of the inputs come once more, by the nodes of
the forward. The same nodes stand around both, and so for gradients of any order. What is inside of the block leads from
one of these calls to others; tokens lead there, too, so that a backward comes to the same calls on all ranks:

    a call -> its backward             f(x) <- token <- f'(x, g)
    and both -> their own backwards    f'(x, g) <- token <- f''(x, g, h)     f(x), f''(x, g, h) <- tokens <- f''(x)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

About = tuple[torch.Size, torch.dtype, torch.device]
"""Shape, dtype and device of a tensor."""

_NONE: About = (torch.Size(()), torch.float32, torch.device("cpu"))
"""Stands for a gradient that is not there."""


@dataclass(frozen=True, kw_only=True)
class GradientChannel:
    """The connection of a call of a block.

    Attributes:
        fqn: The block.
        send: Sends gradients from the rank that has it, and returns them as the others get them.
        receive: Receives them.
    """

    fqn: str
    send: Callable[[Sequence[Tensor | None]], list[Tensor | None]]
    receive: Callable[[Sequence[About]], list[Tensor | None]]


def enter(channel: GradientChannel, anchor: Tensor, inputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """A token, and the inputs for the block.

    Args:
        anchor: A scalar like the token, which that of another call is, where this one is that one's backward.
    """
    entered: tuple[Tensor, ...] = _Enter.apply(channel, anchor, *inputs)  # type: ignore[no-untyped-call]  # torch 2.13
    return entered


def leave(channel: GradientChannel, token: Tensor, outputs: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """A token, and the outputs of the block, which depend on that of ``enter``."""
    left: tuple[Tensor, ...] = _Leave.apply(channel, token, *outputs)  # type: ignore[no-untyped-call]
    return left


def remote(
    channel: GradientChannel,
    values: Callable[[], Sequence[Tensor | None]],
    are_trained: Sequence[bool],
    anchor: Tensor,
    inputs: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """A token, and the outputs of a block that is elsewhere.

    Args:
        values: Receives them.
        are_trained: Which of them require gradients.
        anchor: Requires a gradient, so that they can where no input does.
    """
    outputs: tuple[Tensor, ...] = _Remote.apply(channel, values, are_trained, anchor, *inputs)  # type: ignore[no-untyped-call]
    return outputs


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, channel: GradientChannel, anchor: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.channel = channel
        return (anchor.clone(), *map(_detached, inputs))

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        sent = ctx.channel.send(gradients)
        if not torch.is_grad_enabled():
            return (None, None, *sent)
        assert of_token is not None, "a backward comes to `enter` by `leave`"
        return (None, *leave(ctx.channel, of_token, sent))


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, channel: GradientChannel, token: Tensor, *outputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.channel, left = channel, token.clone()
        ctx.save_for_backward(left)
        return (left, *map(_detached, outputs))

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return (None, torch.zeros_like(token), *gradients)
        return (None, *enter(ctx.channel, _sum(token, of_token), gradients))


class _Remote(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        channel: GradientChannel,
        values: Callable[[], Sequence[Tensor | None]],
        are_trained: Sequence[bool],
        anchor: Tensor,
        *inputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.set_materialize_grads(False)
        ctx.channel, ctx.are_trained, ctx.inputs = channel, are_trained, list(map(_about, inputs))
        token, outputs = anchor.new_zeros(()), values()
        pairs = zip(outputs, are_trained, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, is_trained in pairs if not is_trained and tensor is not None))
        ctx.save_for_backward(token)
        return (token, *outputs)

    @staticmethod
    def backward(ctx: Any, of_token: Tensor | None, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (token,) = ctx.saved_tensors
        if not ctx.inputs:
            return (None, None, None, None)
        values = partial(ctx.channel.receive, ctx.inputs)
        if not torch.is_grad_enabled():
            return (None, None, None, None, *values())
        given = [g for g, is_trained in zip(gradients, ctx.are_trained, strict=True) if is_trained]
        return (None, None, None, *remote(ctx.channel, values, [True] * len(ctx.inputs), _sum(token, of_token), given))


def _sum(token: Tensor, of_token: Tensor | None) -> Tensor:
    return token if of_token is None else token + of_token


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()  # views could not be changed in place


def _about(tensor: Tensor | None) -> About:
    return _NONE if tensor is None else (tensor.shape, tensor.dtype, tensor.device)
