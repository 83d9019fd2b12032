"""A call of a block on the rank that has it, of which all ranks of the pipeline get the results and the gradients.

rank 0      encoder(x): runs it, sends      decoder(y): receives
rank 1      encoder(x): receives            decoder(y): runs it, sends
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_3d.distributed.agreement import on_one_rank
from lightning_3d.distributed.mesh import Mesh
from lightning_3d.distributed.rng import Generators, RandomStates
from lightning_3d.errors import StepError
from lightning_3d.model.pytrees import flatten_call, register_dataclasses
from lightning_3d.pipeline.inline.gradients import About, GradientChannel, enter, leave, remote
from lightning_3d.pipeline.inline.jagged import packed, unpacked
from lightning_3d.pipeline.inline.lockstep import Lockstep
from lightning_3d.torch_internals.pytree import Arguments, tree_flatten, tree_leaves, tree_unflatten
from lightning_3d.torch_internals.tensors import version_of

_BITS = 62  # of a signed number
R = TypeVar("R")
N = TypeVar("N")


@dataclass(frozen=True, kw_only=True)
class _Result:
    """The result of a call."""

    output: object
    """With tensors without data, of the same shapes, strides and dtypes."""
    given: Mapping[int, int]
    """Leaves of the output that are arguments -> their places among the leaves of the arguments; the others follow."""
    on_cpu: frozenset[int]
    """Leaves of the output that are on the CPU."""
    notes: Any
    changed: Sequence[int]
    """The leaves of its arguments that it changed in place, whose values follow."""
    drawn: RandomStates | None
    """The random numbers after it, if it drew any."""


VisibleOutputs = Callable[[object], Any]
"""Gives the tensors that code outside of a block gets to see in place of those inside of it."""

OwnerCall = Callable[[VisibleOutputs, tuple[object, ...], dict[str, object]], tuple[R, N]]
"""The call of a block where it is: (what is shown, args, kwargs) -> (its output, what the others are told)."""


class Exchange:
    """Runs calls of blocks on all ranks of a pipeline together.

    Args:
        device: Where steps run.
        has_collectives: Whether calls of blocks are collectives of the ranks that share their weights.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *, has_collectives: bool) -> None:
        self._group, self.pp_rank = mesh.group("pp"), mesh.pp_rank
        self._device, self._generators = device, Generators(device)
        self.lockstep, self._has_collectives = Lockstep(self._group), has_collectives
        self.edges: dict[str, list[GradientEdge]] = {}
        """FQN of a block that is elsewhere -> where the graphs of what it gave begin."""

    def run(
        self,
        fqn: str,
        owner_rank: int,
        call: OwnerCall[R, N],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[R, N]:
        """Run a call of a block; every rank calls it with the same arguments.

        Args:
            fqn: The block.
            owner_rank: Index on the pp axis of the rank that has it.
            call: Runs it, where it is; returns its output, and anything picklable to tell the others.

        Raises:
            StepError: on every rank, if another one does something else.
            Exception: the call's own, on every rank.
        """
        if self._has_collectives:  # for which others may wait that do not come
            self.lockstep.sync_check(f"a call of {fqn}")
        args, kwargs = packed((args, kwargs))
        register_dataclasses((args, kwargs))
        leaves, with_leaves = flatten_call(args, kwargs)
        trained = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad}
        inputs = [*trained.values()] if torch.is_grad_enabled() else []
        if self.pp_rank == owner_rank:
            output, notes = self._at_owner(fqn, owner_rank, call, leaves, with_leaves, inputs)
        else:
            told: _Result = self._told(fqn, owner_rank, _never)
            output, notes = self._elsewhere(fqn, owner_rank, told, leaves, inputs)
        return unpacked(output), notes

    def read(self, name: str, tensor: Tensor, owner_rank: int) -> Tensor:
        """The value of a parameter or buffer of a block; every rank calls it.

        Args:
            name: For errors.
            tensor: As this rank holds it.
            owner_rank: Index on the pp axis of the rank that has it.
        """
        self.lockstep.sync_check(f"a read of {name}")
        if self.pp_rank == owner_rank:
            self._send(tensor, owner_rank)
            return tensor
        copy = self._receive(tensor.shape, tensor.dtype, owner_rank)
        return nn.Parameter(copy, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy

    def same(self, fqn: str, gradient: Tensor | None, tensor: Tensor, owner_rank: int) -> Tensor | None:
        """The gradient of a parameter of a block as the rank that has it found it; every rank calls it."""
        if self.pp_rank == owner_rank:
            return self._send_gradients(fqn, owner_rank, [gradient])[0]
        return self._receive_gradients(fqn, owner_rank, [(tensor.shape, tensor.dtype, self._device)])[0]

    # ---- on the rank that has the block

    def _at_owner(
        self,
        fqn: str,
        owner_rank: int,
        call: OwnerCall[object, object],
        leaves: list[Any],
        with_leaves: Callable[[list[Any]], Arguments],
        inputs: Sequence[Tensor],
    ) -> tuple[Any, Any]:
        token, entered = None, list[Tensor]()
        if inputs:
            token, *entered = enter(self._channel(fqn, owner_rank), inputs[0].new_zeros(()), inputs)
        replaced = {id(leaf): tensor for leaf, tensor in zip(inputs, entered, strict=True)}
        given = [replaced.get(id(leaf), leaf) for leaf in leaves]
        found: list[Any] = []
        changed: list[int] = []

        def run() -> _Result:
            before, versions = self._generators.states(), _versions(given)
            output, notes = call(partial(_shown, self._channel(fqn, owner_rank), token), *unpacked(with_leaves(given)))
            changed.extend(i for i, version in enumerate(_versions(given)) if version != versions[i])
            _refuse_changed(fqn, [given[i] for i in changed])
            output = packed(output)
            register_dataclasses(output)
            outputs, spec = tree_flatten(output)
            own = {id(tensor): i for i, tensor in enumerate(given) if isinstance(tensor, Tensor)}
            passed = {i: own[id(leaf)] for i, leaf in enumerate(outputs) if id(leaf) in own}
            outputs = [leaf if i in passed else _as_sent(leaf, fqn) for i, leaf in enumerate(outputs)]
            found.extend((outputs, spec, passed, notes))
            return _Result(
                output=tree_unflatten(list(map(_without_data, outputs)), spec),
                given=passed,
                on_cpu=frozenset(i for i, leaf in enumerate(outputs) if isinstance(leaf, Tensor) and leaf.is_cpu),
                notes=notes,
                changed=changed,
                drawn=None if self._generators.are_at(before) else self._generators.states(),
            )

        self._told(fqn, owner_rank, run)
        outputs, spec, passed, notes = found
        sent = [i for i, leaf in enumerate(outputs) if isinstance(leaf, Tensor) and i not in passed]
        for i in sent:
            self._broadcast(outputs[i].detach().to(self._device), owner_rank)
        for i in changed:
            self._send(leaves[i], owner_rank)
        outputs = [leaves[passed[i]] if i in passed else leaf for i, leaf in enumerate(outputs)]
        return tree_unflatten(_attach_token(self._channel(fqn, owner_rank), token, outputs, sent), spec), notes

    # ---- on the others

    def _elsewhere(
        self, fqn: str, owner_rank: int, told: _Result, leaves: Sequence[Any], inputs: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        register_dataclasses(told.output)
        if told.drawn is not None:
            self._generators.restore(told.drawn)
        outputs, spec = tree_flatten(told.output)
        is_sent = [isinstance(leaf, Tensor) and i not in told.given for i, leaf in enumerate(outputs)]
        sent = [(leaf, i in told.on_cpu) for i, leaf in enumerate(outputs) if is_sent[i]]
        trained = [meta.requires_grad for meta, _ in sent]
        if torch.is_grad_enabled() and any(trained):
            anchor = torch.zeros((), device=self._device, requires_grad=True)
            receive = partial(self._receive_all, sent, owner_rank)
            _, *received = remote(self._channel(fqn, owner_rank), receive, trained, anchor, inputs)
            edges = [get_gradient_edge(tensor) for tensor in received if tensor.requires_grad]
            self.edges.setdefault(fqn, []).extend(edges)
        else:
            received = [*self._receive_all(sent, owner_rank)]
        with torch.no_grad():
            for i in told.changed:
                leaves[i].copy_(self._receive(leaves[i].shape, leaves[i].dtype, owner_rank))
        following = iter(received)
        values = [
            leaves[told.given[i]] if i in told.given else next(following) if is_sent[i] else leaf
            for i, leaf in enumerate(outputs)
        ]
        return tree_unflatten(values, spec), told.notes

    def _receive_all(self, sent: Sequence[tuple[Tensor, bool]], owner_rank: int) -> tuple[Tensor, ...]:
        """Receive tensors.

        Args:
            sent: For each one without data, and whether it is to be on the CPU.
        """
        received = []
        for meta, on_cpu in sent:
            tensor = torch.empty_like(meta, device=self._device, requires_grad=False)
            self._broadcast(tensor, owner_rank)
            received.append(tensor.cpu() if on_cpu else tensor)
        return tuple(received)

    # ---- messages

    def _told(self, fqn: str, owner_rank: int, run: Callable[[], _Result]) -> _Result:
        """The result of a call, or what it raised; the ranks compare what they came to on the way."""
        size_of = partial(self.lockstep.sync_check, f"a call of {fqn}", owner_rank=owner_rank)
        return on_one_rank(run, rank=owner_rank, group=self._group, size_of=size_of)

    def _broadcast(self, tensor: Tensor, owner_rank: int) -> None:
        """Send a tensor whose elements lie side by side, of any dtype."""
        if tensor.numel():
            flat = tensor.as_strided((tensor.numel(),), (1,))
            dist.broadcast(flat.view(torch.uint8), group=self._group, group_src=owner_rank)

    def _send(self, tensor: Tensor, owner_rank: int) -> None:
        """Send any tensor to `_receive`."""
        self._broadcast(tensor.detach().clone(memory_format=torch.contiguous_format).to(self._device), owner_rank)

    def _receive(self, shape: torch.Size, dtype: torch.dtype, owner_rank: int) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self._broadcast(tensor, owner_rank)
        return tensor

    def _channel(self, fqn: str, owner_rank: int) -> GradientChannel:
        send, receive = (
            partial(self._send_gradients, fqn, owner_rank),
            partial(self._receive_gradients, fqn, owner_rank),
        )
        return GradientChannel(fqn=fqn, send=send, receive=receive)

    def _send_gradients(self, fqn: str, owner_rank: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Send gradients, of which some may be absent; returns them as the others get them."""
        self._are_there(fqn, owner_rank, [gradient is not None for gradient in gradients])
        sent = [None if gradient is None else gradient.contiguous() for gradient in gradients]
        for gradient in sent:
            if gradient is not None:
                self._broadcast(gradient.detach().to(self._device), owner_rank)
        return sent

    def _receive_gradients(self, fqn: str, owner_rank: int, of: Sequence[About]) -> list[Tensor | None]:
        pairs = zip(of, self._are_there(fqn, owner_rank, [False] * len(of)), strict=True)
        return [
            self._receive(shape, dtype, owner_rank).to(device) if is_there else None
            for (shape, dtype, device), is_there in pairs
        ]

    def _are_there(self, fqn: str, owner_rank: int, are_there: Sequence[bool]) -> list[bool]:
        """Which gradients the rank that has the block has; as many bits as a number holds go with each check."""
        found: list[bool] = []
        for start in range(0, max(1, len(are_there)), _BITS):
            part = are_there[start : start + _BITS]
            number = sum(is_there << bit for bit, is_there in enumerate(part))
            number = self.lockstep.sync_check(f"the backward of {fqn}", number, owner_rank)
            found.extend(bool(number >> bit & 1) for bit in range(len(part)))
        return found


def _attach_token(
    channel: GradientChannel, token: Tensor | None, leaves: Sequence[Any], places: Sequence[int]
) -> list[object]:
    """Leaves of which those at these places that require gradients depend on the token."""
    trained = [i for i in places if isinstance(leaves[i], Tensor) and leaves[i].requires_grad]
    left = list(leaves)
    if token is not None and trained:
        _, *outputs = leave(channel, token, [leaves[i] for i in trained])
        for i, tensor in zip(trained, outputs, strict=True):
            left[i] = tensor
    return left


def _shown(channel: GradientChannel, token: Tensor | None, tree: object) -> object:
    register_dataclasses(tree)
    leaves, spec = tree_flatten(tree)
    return tree_unflatten(_attach_token(channel, token, leaves, range(len(leaves))), spec)


def _refuse_changed(fqn: str, changed: Sequence[Tensor]) -> None:
    if any(tensor.requires_grad for tensor in changed):
        raise StepError(
            f"{fqn} changed in place an argument that requires gradients, whose graph the ranks of other pipeline"
            " stages have, too. Let it compute a new tensor, as relu without inplace=True."
        )


def _never() -> NoReturn:
    raise AssertionError("the rank that has the block runs it")


def versions_of(tree: object) -> list[int | None]:
    """How often each leaf was changed in place; None of those that are no tensors, or do not count."""
    return _versions(tree_leaves(tree))


def _versions(leaves: Sequence[object]) -> list[int | None]:
    return [version_of(leaf) if isinstance(leaf, Tensor) and not leaf.is_inference() else None for leaf in leaves]


def _as_sent(leaf: object, fqn: str) -> object:
    """A tensor with the strides that others can make, so that all ranks compute the same bits with it."""
    if not isinstance(leaf, Tensor):
        return leaf
    if leaf.layout is not torch.strided or leaf.is_nested:
        raise StepError(
            f"{fqn} returned a tensor of layout {leaf.layout}, which is not sent between pipeline stages: use a dense"
            " one, or pipeline_parallel_size=1."
        )
    return leaf if leaf.stride() == torch.empty_like(leaf, device="meta").stride() else leaf.clone()


def _without_data(leaf: Any) -> object:
    is_tensor = isinstance(leaf, Tensor)
    return torch.empty_like(leaf, device="meta", requires_grad=leaf.requires_grad) if is_tensor else leaf
