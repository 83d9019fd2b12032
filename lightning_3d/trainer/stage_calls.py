"""Calls of blocks outside of steps, with a pipeline: the rank that has the block runs it, and all get what it gives.

    rank 0      encoder(x): runs it, sends      decoder(y): receives
    rank 1      encoder(x): receives            decoder(y): runs it, sends

So each of them runs the whole of ``self(x)`` in a hook, with the same inputs, as it does under DDP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import Generators, RandomStates
from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import SUMMON, Call
from lightning_3d.model.pytrees import register_dataclasses
from lightning_3d.ranks.rendezvous import Rendezvous
from lightning_3d.torch_internals.pytree import tree_leaves, tree_map_only
from lightning_3d.torch_internals.tensors import version_of


@dataclass(frozen=True, kw_only=True)
class _Sent:
    """A tensor that follows."""

    shape: torch.Size
    dtype: torch.dtype
    on_cpu: bool
    requires_grad: bool


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The output of a block, its tensors described, and the random numbers after it if it drew any."""

    output: Any
    drawn: RandomStates | None


class StageCalls:
    """Runs calls of blocks outside of steps on all ranks of a replica together.

    Args:
        ranks: Those that call together.
        device: Where steps run.
    """

    def __init__(self, mesh: Mesh, ranks: Sequence[int], rendezvous: Rendezvous, device: torch.device) -> None:
        self._group, self._pp_rank, self._ranks = mesh.group("pp"), mesh.pp_rank, ranks
        self._met, self._device, self._generators = rendezvous, device, Generators(device)
        self._is_running = False

    def __deepcopy__(self, memo: dict[int, Any]) -> StageCalls:
        return self

    def __reduce__(self) -> Any:
        """A pickled block belongs to no ranks."""
        return _nothing, ()

    def run(self, fqn: str, holder: int, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of a block where its weights are; every rank of the replica calls it.

        Args:
            fqn: The block.
            holder: Index on the pp axis of the rank that has it.

        Raises:
            StepError: another rank does something else.
            Exception: the call's own, on every rank.
        """
        if self._met.is_agreed or self._is_running:
            return call(*args, **kwargs)
        self._met.meet(self._ranks, f"a call of {fqn}")
        output: Any = None

        def result() -> _Result:
            nonlocal output
            before = self._generators.states()
            self._is_running = True
            try:
                output = _run_pure(fqn, call, args, kwargs)
            finally:
                self._is_running = False
            register_dataclasses(output)
            drawn = None if self._generators.are_at(before) else self._generators.states()
            return _Result(output=tree_map_only(Tensor, _described, output), drawn=drawn)

        told = on_one_rank(result, self._device, rank=holder, group=self._group)
        if self._pp_rank == holder:
            return tree_map_only(Tensor, partial(self._send, fqn, holder), output)
        if told.drawn is not None:
            self._generators.restore(told.drawn)
        return tree_map_only(_Sent, partial(self._receive, fqn, holder), told.output)

    def _send(self, fqn: str, holder: int, tensor: Tensor) -> Tensor:
        self._broadcast(tensor.detach().to(self._device).contiguous(), holder)
        return _ends_here(tensor.detach(), fqn) if tensor.requires_grad else tensor

    def _receive(self, fqn: str, holder: int, sent: _Sent) -> Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=self._device)
        self._broadcast(tensor, holder)
        tensor = tensor.cpu() if sent.on_cpu else tensor
        return _ends_here(tensor, fqn) if sent.requires_grad else tensor

    def _broadcast(self, tensor: Tensor, holder: int) -> None:
        if tensor.numel():  # of any dtype
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self._group, group_src=holder)


def _nothing() -> None:
    return None


def _described(tensor: Tensor) -> _Sent:
    return _Sent(shape=tensor.shape, dtype=tensor.dtype, on_cpu=tensor.is_cpu, requires_grad=tensor.requires_grad)


def _run_pure(fqn: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call that changes none of its arguments, which other ranks have, too."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [version_of(tensor) for tensor in tensors]
    output = call(*args, **kwargs)
    if [version_of(tensor) for tensor in tensors] != versions:
        raise StepError(
            f"{fqn} changed its arguments in place in a call outside of a step, which other pipeline stages don't see."
            f" Call it on every rank {SUMMON}."
        )
    return output


class _Ends(torch.autograd.Function):
    """An output of which no backward follows."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, fqn: str) -> Tensor:
        ctx.fqn = fqn
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise StepError(
            f"A backward came to {ctx.fqn}, which was called outside of a step, but with a pipeline gradients pass"
            f" between stages in training_step alone. Call it and run the backward on every rank {SUMMON}."
        )


def _ends_here(tensor: Tensor, fqn: str) -> Tensor:
    anchor = torch.ones((), requires_grad=True)
    ended: Tensor = _Ends.apply(anchor, tensor, fqn)  # type: ignore[no-untyped-call]
    return ended
