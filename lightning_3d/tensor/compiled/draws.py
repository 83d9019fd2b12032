"""Random numbers of a compiled block: drawn before each call, by the operators that draw them in its eager code.

    observed    the eager code runs, and what it draws is noted: operators, shapes, probabilities, in order
    captured    where the code draws, it gets further arguments of the computation
    called      what was noted is drawn eagerly and given to the computation

So the numbers are those of eager blocks and all generators advance alike, in whatever order the compiler computes; and
what computes a call again draws the same, if it restores the generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_3d.tensor.rules.randomness import OwnDrops, apply_drops, drawn_by
from lightning_3d.torch_internals.autograd import recomputed_by
from lightning_3d.torch_internals.capture import NotCompilable
from lightning_3d.torch_internals.dispatch import (
    OperatorMode,
    OpOverload,
    draws_random_numbers,
    no_dispatch_modes,
    schema_of,
)
from lightning_3d.torch_internals.pytree import tree_leaves

_aten = torch.ops.aten

_DROPOUT = _aten.native_dropout.default
"""Gives what is left, and what was kept."""

_BERNOULLI = _aten.bernoulli_.float

_FILLS = frozenset(
    {
        *(_aten.bernoulli_, _aten.cauchy_, _aten.exponential_, _aten.geometric_),
        *(_aten.log_normal_, _aten.normal_, _aten.random_, _aten.uniform_),
    }
)
"""Draw all elements of their first argument."""

_LIKE = frozenset({_aten.rand_like, _aten.randn_like, _aten.randint_like, _aten.native_dropout})
"""Draw as many numbers as their first argument has elements."""

_NEW = frozenset({_aten.rand, _aten.randn, _aten.randint, _aten.randperm, _aten.normal})
"""Draw numbers without looking at any."""


class _Layout(NamedTuple):
    """How a tensor lies in memory, which decides which element gets which number."""

    shape: torch.Size
    stride: tuple[int, ...]
    """0 where it does not matter."""

    dtype: torch.dtype
    device: torch.device


def _layout(tensor: Tensor) -> _Layout:
    stride = tuple([n if size > 1 else 0 for size, n in zip(tensor.shape, tensor.stride(), strict=True)])
    return _Layout(tensor.shape, stride, tensor.dtype, tensor.device)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draw:
    """A call of an operator that draws random numbers, without data."""

    op: OpOverload
    first: _Layout | None
    """Its first argument, if that is a tensor."""

    args: tuple[Any, ...]
    """The others."""

    kwargs: Mapping[str, Any]

    def __call__(self) -> Tensor:
        first: tuple[Tensor, ...] = ()
        if self.first is not None:
            shape, stride, dtype, device = self.first
            first = (torch.empty_strided(shape, stride, dtype=dtype, device=device),)
        output = self.op(*first, *self.args, **self.kwargs)
        drawn: Tensor = output[1] if self.op is _DROPOUT else output
        return drawn


def _read(op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Draw:
    """A call of an operator, to be made again ahead of what needs its numbers."""
    packet = op.overloadpacket
    has_first = packet in _FILLS or packet in _LIKE
    more = [argument for argument in schema_of(op).arguments[len(args) :] if not argument.kwarg_only]
    args = (*args, *[argument.default_value for argument in more])  # arguments are left out that are the defaults
    first, rest = (_layout(args[0]), args[1:]) if has_first else (None, args)
    reads_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves((rest, kwargs)))
    if reads_tensors or not (has_first or packet in _NEW):
        raise NotCompilable(f"{op} draws random numbers that depend on values of tensors, or while it computes")
    if any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((rest, kwargs))):
        raise NotCompilable("it draws random numbers from a generator of its own")
    return _Draw(op=op, first=first, args=rest, kwargs=kwargs)


class Draws:
    """All that a block draws in one kind of call."""

    def __init__(self) -> None:
        self.expected: list[_Draw | OwnDrops] = []
        """In order."""

    def draw(self) -> list[Tensor]:
        """Draw the numbers of a call."""
        return [draw() for draw in self.expected]

    def note_own(self, drops: OwnDrops) -> Tensor:
        """Add what is drawn for this rank's part of a tensor, and draw it."""
        self.expected.append(drops)
        with no_dispatch_modes():
            return drops()


class _Drawing(OperatorMode):
    """Steps in where an operator draws random numbers."""

    def __init__(self) -> None:
        super().__init__()

    def on_draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call that draws."""
        raise NotImplementedError

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        with self:  # in inference mode operators arrive here that are made up of others
            output = func.decompose(*args, **kwargs)
        return self.on_draw(func, args, kwargs) if output is NotImplemented else output


class _Noting(_Drawing):
    """Notes what is drawn."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self._draws = draws

    def on_draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._draws.expected.append(_read(func, args, kwargs))
        return func(*args, **kwargs)


@contextmanager
def draws_noted() -> Iterator[Draws]:
    """Note what eager code inside draws.

    Raises:
        NotCompilable: it draws what can't be drawn ahead.
    """
    draws = Draws()
    with drawn_by(draws.note_own), _Noting(draws):
        yield draws


class _Giving(_Drawing):
    """Gives tensors in place of what would be drawn, from position `num_given` on."""

    def __init__(self, expected: Sequence[_Draw | OwnDrops], drawn: Sequence[Tensor], num_given: int) -> None:
        super().__init__()
        self._expected, self._drawn, self.num_given = expected, drawn, num_given

    def on_draw(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found, expected = _read(func, args, kwargs), self._next
        is_split = found.op is _DROPOUT and isinstance(expected, _Draw) and expected.op is _BERNOULLI
        drawn = self.give(_split_dropout(*args, **kwargs) if is_split else found)
        if func is _DROPOUT:
            return _dropped(*args, **kwargs, kept=drawn), drawn.to(torch.bool, copy=True)
        return args[0].copy_(drawn) if func.overloadpacket in _FILLS else drawn.clone()

    @property
    def _next(self) -> _Draw | OwnDrops | None:
        return self._expected[self.num_given] if self.num_given < len(self._expected) else None

    def give(self, found: _Draw | OwnDrops) -> Tensor:
        """The numbers of a draw, if it is the one that comes next."""
        if found != self._next:
            raise NotCompilable("it draws other random numbers from run to run, or where gradients are taken")
        self.num_given += 1
        return self._drawn[self.num_given - 1]


def _split_dropout(input: Tensor, p: float, train: bool | None) -> _Draw:
    """The draw of an eager dropout on a CPU, where tracing has one operator for all of it."""
    return _Draw(op=_BERNOULLI, first=_layout(torch.empty_like(input)), args=(1.0 - p,), kwargs={})


def _dropped(input: Tensor, p: float, train: bool | None, *, kept: Tensor) -> Tensor:
    if train is False:
        return input.clone()
    if kept.dtype == torch.bool:
        return apply_drops(input, kept, p) if p < 1.0 else input * kept * 0.0
    return apply_drops(input, kept.div(1.0 - p), p)  # as that eager dropout rounds


@contextmanager
def draws_given(draws: Draws, drawn: Sequence[Tensor]) -> Iterator[None]:
    """Let code inside, which is being captured, find drawn what it would draw; as do its checkpoints in the backward.

    Args:
        draws: What it would draw.
        drawn: The numbers.

    Raises:
        NotCompilable: it draws something else.
    """
    expected = draws.expected
    with _giving(expected, drawn, 0) as mode:
        yield
    if mode.num_given < len(expected):
        raise NotCompilable("it draws fewer random numbers where gradients are taken")


@contextmanager
def _giving(expected: Sequence[_Draw | OwnDrops], drawn: Sequence[Tensor], num_given: int) -> Iterator[_Giving]:
    mode = _Giving(expected, drawn, num_given)

    def again(function: Callable[..., Any]) -> Callable[..., Any]:
        before = mode.num_given

        def recompute(*args: Any, **kwargs: Any) -> Any:
            with _giving(expected, drawn, before):
                return function(*args, **kwargs)

        return recompute

    with drawn_by(mode.give), recomputed_by(again), mode:
        yield mode
