"""The graph that autograd has recorded, which torch 2.13 shows by ``grad_fn`` and ``next_functions``."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


def reachable_nodes(outputs: Iterable[Tensor]) -> set[object]:
    """The nodes that the backward of these outputs runs."""
    waiting: list[object] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    nodes: set[object] = set(waiting)
    while waiting:
        for node, _ in waiting.pop().next_functions:  # type: ignore[attr-defined]
            if node is not None and node not in nodes:
                nodes.add(node)
                waiting.append(node)
    return nodes
