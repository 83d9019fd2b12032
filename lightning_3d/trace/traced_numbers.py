"""Integers that note, while a step is traced, what the step decides by them.

A step is traced once and then followed, also where it reads ``batch_idx`` or ``self.current_epoch``. The trace holds as
long as each decision that was made by such a number comes out the same:

    if self.global_step % 100 == 0:        notes the decision  global_step % 100 == 0
    loss * (1 + self.global_step)          decides nothing

So in later steps the noted decisions are made again, on their values, and a step whose decisions come out otherwise is
one of another kind, with a trace of its own. A number that code in C takes (``range(n)``, ``math.cos(n)``) is not seen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from lightning.pytorch import LightningModule, Trainer

from lightning_3d.torch_internals.patches import replaced

_ARITHMETIC: Mapping[str, Callable[..., object]] = {
    name: getattr(operator, name) for name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow", "neg", "abs")
}
_COMPARISONS: Mapping[str, Callable[..., object]] = {
    name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
_VALUES: Mapping[str, Callable[..., object]] = {"bool": bool, "int": int}
_MAX_DECISIONS = 64

_Operand: TypeAlias = "Expression | int | float"
Expression: TypeAlias = tuple[str, tuple[_Operand, ...]] | tuple[str]
"""A named number, or an operation and its operands."""

OF_TRAINER = ("current_epoch", "global_step")
"""Numbers that a LightningModule and its Trainer have."""


class TracedInt(int):
    """An integer that notes decisions made by it."""

    expression: Expression
    decisions: Decisions

    def __hash__(self) -> int:
        return hash(self._decided("int"))

    def __bool__(self) -> bool:
        return bool(self._decided("bool"))

    def __int__(self) -> int:
        return int(self._decided("int"))

    def __reduce__(self) -> tuple[object, ...]:
        return int, (int.__int__(self),)

    def _decided(self, name: str, *others: object) -> Any:
        expression: Expression = (name, (self.expression, *map(_operand, others)))
        self.decisions.note(expression)
        return _OPERATIONS[name](int.__int__(self), *map(_plain, others))

    def _computed(self, name: str, *others: object, reflected: bool = False) -> object:
        operands = [self, *others]
        if not all(isinstance(other, int | float) for other in others):
            return NotImplemented
        if reflected:
            operands.reverse()
        result = _OPERATIONS[name](*map(_plain, operands))
        if type(result) is not int:
            return result
        return self.decisions.traced(result, (name, tuple(map(_operand, operands))))


def _set_operators() -> None:
    def computing(name: str, *, reflected: bool = False) -> Callable[..., object]:
        return lambda self, *others: self._computed(name, *others, reflected=reflected)

    def comparing(name: str) -> Callable[..., object]:
        def compare(self: TracedInt, other: object) -> object:
            return self._decided(name, other) if isinstance(other, int | float) else NotImplemented

        return compare

    for name in _ARITHMETIC:
        setattr(TracedInt, f"__{name}__", computing(name))
        if name not in ("neg", "abs"):
            setattr(TracedInt, f"__r{name}__", computing(name, reflected=True))
    for name in _COMPARISONS:
        setattr(TracedInt, f"__{name}__", comparing(name))


_set_operators()
_OPERATIONS: Mapping[str, Callable[..., object]] = {**_ARITHMETIC, **_COMPARISONS, **_VALUES}


def _plain(value: object) -> object:
    return int.__int__(value) if isinstance(value, TracedInt) else value


def _operand(value: Any) -> _Operand:
    return value.expression if isinstance(value, TracedInt) else value


class Decisions:
    """Decisions by numbers that a step made while it was traced."""

    def __init__(self) -> None:
        self._noted: dict[Expression, None] = {}
        self._notes_values = True

    def note(self, expression: Expression) -> None:
        """Note a decision; the newest of too many are left out."""
        if len(self._noted) < _MAX_DECISIONS and (self._notes_values or expression[0] != "int"):
            self._noted[expression] = None

    def outcomes(self, values: Mapping[str, int]) -> tuple[object, ...]:
        """How all that were noted come out for these numbers."""
        return tuple(_evaluate(expression, values) for expression in self._noted)

    def traced(self, value: int, expression: Expression) -> TracedInt:
        """A number whose decisions are noted here."""
        number = TracedInt(value)
        number.expression, number.decisions = expression, self
        return number

    @contextmanager
    def noted(self, values: Mapping[str, int], *, notes_values: bool = True) -> Iterator[Mapping[str, TracedInt]]:
        """Let modules and Trainers give numbers inside that note decisions; also given, by name.

        Args:
            notes_values: Whether a number that leaves as a plain one, as to a logger, counts as a decision.
        """
        traced = {name: self.traced(value, (name,)) for name, value in values.items()}
        before, self._notes_values = self._notes_values, notes_values
        with ExitStack() as stack:
            stack.callback(setattr, self, "_notes_values", before)
            for owner in (LightningModule, Trainer):
                numbers = {name: property(lambda _, name=name: traced[name]) for name in OF_TRAINER}  # type: ignore[misc]
                stack.enter_context(replaced("numbers", owner, numbers))
            yield traced


def _evaluate(expression: _Operand, values: Mapping[str, int]) -> object:
    if not isinstance(expression, tuple):
        return expression
    if len(expression) == 1:
        return values[expression[0]]
    name, operands = expression
    try:
        return _OPERATIONS[name](*(_evaluate(operand, values) for operand in operands))
    except ArithmeticError:
        return None
