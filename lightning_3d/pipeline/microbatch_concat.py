"""How tensors of the microbatches make up that of the whole batch, and random numbers that steps draw do.

Numbers are drawn outside of blocks, of the batch alone: noise, timesteps, masks. Each microbatch draws its own. Where
code runs again on the whole batch, it has to meet the same, or the noise that a loss compares with is not that which
the blocks were given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.errors import StepError
from lightning_3d.model.block_runner import AnyCallable
from lightning_3d.planning.stage_flow import StageFlow
from lightning_3d.torch_internals.pytree import tree_leaves
from lightning_3d.trace.fake_blocks import RandomnessSeen
from lightning_3d.trace.ghost import TensorMeta
from lightning_3d.trace.refusals import user_frame


class MicrobatchConcat:
    """How a tensor of each microbatch makes up one of the batch.

    Args:
        shares: The microbatches' shares of the samples.
        repeats_per_sample: How many times the samples come one after the other (``row_order.py``).

    Raises:
        ValueError: they don't.
    """

    def __init__(
        self, whole: TensorMeta, parts: Sequence[TensorMeta], shares: Sequence[float], repeats_per_sample: int = 1
    ) -> None:
        self._shares, self._repeats_per_sample = shares, repeats_per_sample
        shapes = [part.shape for part in parts]
        problem = f"shapes {shapes} for the microbatches, which don't make up the {whole.shape} for the whole batch"
        if any(len(shape) != len(whole.shape) for shape in shapes):
            raise ValueError(problem)
        grown = [dim for dim, size in enumerate(whole.shape) if any(shape[dim] != size for shape in shapes)]
        self.dim = grown[0] if grown else None
        """The dimension of the samples."""
        self._sizes = [shape[grown[0]] if grown else 0 for shape in shapes]
        if len(grown) > 1 or (grown and sum(self._sizes) != whole.shape[grown[0]]):
            raise ValueError(problem)

    @property
    def is_constant(self) -> bool:
        """Whether there are several parts, and their shapes do not depend on the samples."""
        return self.dim is None and len(self._shares) > 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Along the dimension of the samples; the mean of what has none, such as a loss of a block's own."""
        if self.dim is not None:
            repeats_per_sample = [part.unflatten(self.dim, (self._repeats_per_sample, -1)) for part in parts]
            return torch.cat(repeats_per_sample, self.dim + 1).flatten(self.dim, self.dim + 1)
        if not (parts[0].is_floating_point() or parts[0].is_complex()):
            return parts[0].clone()
        return torch.stack([part * share for part, share in zip(parts, self._shares, strict=True)]).sum(0)

    def split(self, gradient: Tensor | None) -> list[Tensor | None]:
        """The gradients of the parts, from that of the whole."""
        if gradient is None:
            return [None] * len(self._sizes)
        if self.dim is not None:
            sizes = [size // self._repeats_per_sample for size in self._sizes]
            repeats_per_sample = gradient.unflatten(self.dim, (self._repeats_per_sample, -1)).split(sizes, self.dim + 1)
            return [view.flatten(self.dim, self.dim + 1) for view in repeats_per_sample]
        return [gradient * share for share in self._shares]


def grown_dim(meta: TensorMeta, other: TensorMeta) -> int | None:
    """The dimension of the samples: the first whose size differs for another number of them."""
    pairs = enumerate(zip(meta.shape, other.shape, strict=False))
    return next((dim for dim, (size, of_other) in pairs if size != of_other), None)


def check_same_calls(whole: StageFlow, parts: Sequence[StageFlow]) -> None:
    """Raise where the step does not go the same way for the whole batch and for its microbatches.

    Raises:
        StepError: it does not.
    """
    calls = [(call.name, call.outputs) for call in whole.trace.calls]
    if any([(call.name, call.outputs) for call in part.trace.calls] != calls for part in parts):
        raise StepError(
            "The step makes other calls for the whole batch than for its microbatches, as one that takes a batch apart"
            " into its samples, so the loss of the whole batch can't be computed from what the blocks gave. Set"
            " pipeline.loss='mean' or 'sum'."
        )


def received_concats(
    stage: int,
    whole: StageFlow,
    parts: Sequence[StageFlow],
    shares: Sequence[float],
    repeats_per_sample: Sequence[int] | None = None,
) -> list[MicrobatchConcat]:
    """How the tensors that a stage receives for the microbatches make up those for the whole batch.

    Args:
        repeats_per_sample: Their numbers of views; one if None.

    Raises:
        StepError: they don't.
    """
    check_same_calls(whole, parts)
    if any(part.trace.host_position != whole.trace.host_position for part in parts):
        raise StepError(
            "The step draws other numbers of Python's or NumPy's random generators for the whole batch than for its"
            " microbatches, whose loss needs the same again. Draw as many for a batch of any size, or draw with torch,"
            " in the dataset, or in a module that is a block, or set pipeline.loss='mean'."
        )
    columns = list(zip(*(flow.metas(flow.received(stage)) for flow in (whole, *parts)), strict=True))
    repeats_per_sample = [1] * len(columns) if repeats_per_sample is None else repeats_per_sample
    try:
        pairs = zip(columns, repeats_per_sample, strict=True)
        return [MicrobatchConcat(of_whole, of_parts, shares, num) for (of_whole, *of_parts), num in pairs]
    except ValueError as error:
        raise StepError(
            f"Blocks give tensors of {error}, so its loss can't be computed. Let one dimension of what they return be"
            " the samples, or set pipeline.loss='mean' or 'sum'."
        ) from error


@dataclass(frozen=True)
class _Drawn:
    """The random numbers of one call."""

    tensors: list[Tensor]
    limits: list[int]
    """Integers that it was given besides shapes."""


class Draws:
    """Notes what microbatches draw, and repeats it for the whole batch.

    Args:
        shares: The microbatches' shares of the samples.
        takes_places: Whether samples may be picked by draws, as by ``torch.randperm(len(x))``: by the microbatches'
            places, those that they pick for the whole batch are wrong, which then shows.
    """

    def __init__(self, shares: Sequence[float], *, takes_places: bool = False) -> None:
        self._shares, self._takes_places = shares, takes_places
        self._drawn: list[list[_Drawn]] = [[] for _ in shares]  # by microbatch, call
        self._position = 0

    @property
    def have_drawn(self) -> bool:
        """Whether microbatches drew any."""
        return any(self._drawn)

    def note(self, index: int, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Make a call of a torch function for a microbatch, and note what it drew, if it did."""
        with RandomnessSeen() as randomness:
            output = func(*args, **kwargs)
        if randomness.seen:
            self._drawn[index].append(_Drawn([leaf.detach().clone() for leaf in _tensors(output)], _ints(args, kwargs)))
        return output

    def repeat(self, func: AnyCallable, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Make a call for the whole batch; if it draws, it gives what the microbatches drew.

        Raises:
            StepError: these don't make up what the whole batch draws.
        """
        with RandomnessSeen() as randomness:
            output = func(*args, **kwargs)
        if not randomness.seen:
            return output
        position, self._position = self._position, self._position + 1
        if all(len(of_part) <= position for of_part in self._drawn):  # after what the blocks need
            return output
        try:
            drawn, tensors = [of_part[position] for of_part in self._drawn], _tensors(output)
            has_limits = any(own.limits != _ints(args, kwargs) for own in drawn)
            if has_limits and not self._takes_places and not all(leaf.is_floating_point() for leaf in tensors):
                raise ValueError("places of samples")
            for leaf, parts in zip(tensors, zip(*(own.tensors for own in drawn), strict=True), strict=True):
                _put(leaf, parts, self._shares)
        except (IndexError, ValueError) as error:
            raise StepError(
                f"{getattr(func, '__name__', func)} (called at {user_frame()}) draws random numbers in the step, for"
                " each microbatch others, that do not make up those of the whole batch, whose loss needs them again."
                " Draw numbers for each sample, in a module that is a block, or in the dataset, or set"
                " pipeline.loss='mean'."
            ) from error
        return output


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _ints(args: tuple[object, ...], kwargs: dict[str, object]) -> list[int]:
    return [leaf for leaf in (*args, *kwargs.values()) if type(leaf) is int]


@torch.no_grad()
def _put(whole: Tensor, parts: Sequence[Tensor], shares: Sequence[float]) -> None:
    concat = MicrobatchConcat(TensorMeta.of(whole), [TensorMeta.of(part) for part in parts], shares)
    if concat.is_constant and any(not torch.equal(part, parts[0]) for part in parts):
        raise ValueError("one draw for the whole batch")
    whole.copy_(concat.join(parts))
