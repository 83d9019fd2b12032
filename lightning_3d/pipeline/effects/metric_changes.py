"""Sending what metrics changed in themselves to ranks that did not update them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.torch_internals.lightning_helpers import FIXED_NAMES
from lightning_3d.torch_internals.modules import TORCH_ATTRIBUTES
from lightning_3d.torch_internals.pytree import tree_map


class MetricChanges:
    """Changes of metrics since this was made; of list states only the new entries are sent."""

    def __init__(self, metrics: Mapping[str, nn.Module]) -> None:
        self._metrics = metrics
        self._before = {fqn: _state(metric) for fqn, metric in metrics.items()}

    def found(self, fqns: Sequence[str], *, was_reset: bool) -> dict[str, dict[str, Any]]:
        """FQN of a metric -> its changed attributes, for these metrics and those inside of them.

        Args:
            was_reset: Whether one of them was reset.
        """
        touched = {id(inner) for fqn in fqns for inner in self._metrics[fqn].modules()}
        return {
            fqn: {
                name: _Appended(entries=tuple(value[len(before.get(name, ())) :]))
                if not was_reset and _grew(before.get(name), value)
                else value
                for name, value in _state(metric).items()
                if isinstance(value, (Tensor, list, dict)) or before.get(name, self) is not value
            }
            for fqn, metric in self._metrics.items()
            if id(metric) in touched
            for before in [self._before[fqn]]
        }


@dataclass(frozen=True, kw_only=True)
class _Appended:
    entries: tuple[Any, ...]


def _grew(before: Any, after: Any) -> bool:
    return type(before) is list and type(after) is list and len(after) >= len(before)


def _state(metric: nn.Module) -> dict[str, Any]:
    """Attributes that updates may change."""
    fixed = TORCH_ATTRIBUTES | FIXED_NAMES
    return {name: _shallow(value) for name, value in vars(metric).items() if name not in fixed and not callable(value)}


def apply_changes(
    changes: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, nn.Module], move: Callable[[Any], Any]
) -> None:
    """Put changes of another rank's metrics into this rank's; ``move`` puts a tensor on this rank's device."""
    for fqn, attributes in changes.items():
        own = vars(metrics[fqn])
        for name, value in attributes.items():
            if isinstance(value, _Appended):
                own[name] = [*own[name], *tree_map(move, list(value.entries))]
            else:
                own[name] = tree_map(move, value)


def _shallow(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value
