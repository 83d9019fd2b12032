"""A call of user code with sharded tensors, and how every rank makes it on its own parts.

[Note: replicated is plain]
Inside a block a tensor that every rank has whole is a plain tensor, and only a sharded one is a `ShardedTensor`. Calls
on plain tensors alone are the user's own, untouched. Sharding begins where a plain activation meets a column weight,
lives through the calls that have a sharded form, and ends at a row weight (an all-reduce) or, at a price, at a call
that has none (an all-gather). A sum whose parts lie on the ranks is made at once.

         plain          sharded                                  plain
    x ---------> column ---------> view, attention, gelu, ... ---------> row, all-reduce --> y

A rule (`rules`) reads a `TorchCall` and says by a `LocalCall` what every operand must be, what each rank computes, and
what the results are. `interpret` carries that out; planning and running differ only in the axis that they do it over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_3d.sharding.axis import Axis
from lightning_3d.sharding.placement import REPLICATE, Partial, Placement
from lightning_3d.sharding.rules.function import Function, map_tensors, tensors_in
from lightning_3d.torch_internals.dispatch import SET_DATA, is_in_place


class TorchCall:
    """A call of a torch function; `name` is what the table of rules goes by."""

    __slots__ = ("args", "function", "kwargs", "name", "tensors")

    def __init__(self, function: Function, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.function, self.name, self.args, self.kwargs = function, name, args, kwargs
        self.tensors: tuple[Tensor, ...] = tuple(tensors_in((args, kwargs)))
        """All tensors among the arguments."""

    @property
    def first(self) -> Any:
        """The first positional argument; None if there is none."""
        return self.args[0] if self.args else None

    @property
    def starts_with_its_tensor(self) -> bool:
        """Whether its first argument is its only tensor."""
        return len(self.tensors) == 1 and self.first is self.tensors[0]

    @property
    def destination(self) -> Tensor | None:
        """The tensor that the call changes in place, or None."""
        if isinstance(self.kwargs.get("out"), Tensor):
            return self.kwargs["out"]  # type: ignore[no-any-return]  # just checked
        changes = self.function == SET_DATA or is_in_place(self.name)
        return self.first if changes and isinstance(self.first, Tensor) else None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> TorchCall:
        """The same call with each of its tensors changed."""
        args, kwargs = map_tensors(change, (self.args, self.kwargs))
        return TorchCall(self.function, self.name, args, kwargs)

    def run(self, *tensors: Tensor) -> Any:
        """The same call with others in the place of its tensors."""
        others = iter(tensors)
        args, kwargs = map_tensors(lambda _: next(others), (self.args, self.kwargs))
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class RunningStatistic:
    """A buffer with one element per channel, of which every rank reads and changes its own channels."""

    changes: bool


InputPlacement = Placement | RunningStatistic


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalCall:
    """How every rank makes a call."""

    tensors: tuple[Tensor, ...]

    input_placements: tuple[InputPlacement, ...]
    """The placement that each of them must have; those that lie otherwise are brought into it."""

    run: Callable[..., Any]
    """Computes this rank's results from these tensors."""

    result: Placement | tuple[Placement, ...] = REPLICATE
    """The placement of all tensors among the results, or of each; a partial one is summed at once."""

    weight: Tensor | None = None
    """The column or row weight whose use this is."""

    makes_weight: bool = False
    """Whether the results are the weight in another form, such as its transpose."""

    offsets: tuple[int, ...] = ()
    """Where the results begin along the sharded dim of the only tensor, if they are pieces of it."""

    sends: int = 0
    """Bytes that a rank sends while it computes, beside those for operands and sums."""

    idle: int = 0
    """Bytes that might be sent while the rank that computes longest still does."""

    epilogue: Callable[[Tensor], Any] | None = None
    """A further call on the result, such as adding a bias to the sum."""


Rule = Callable[[TorchCall, Axis], LocalCall | None]
"""Gives None for a call that it has no sharded form for."""


def on_whole(call: TorchCall) -> LocalCall:
    """Every rank makes the call on whole tensors."""
    tensors = call.tensors
    return LocalCall(tensors=tensors, input_placements=(REPLICATE,) * len(tensors), run=call.run)


PARTIAL = Partial()
